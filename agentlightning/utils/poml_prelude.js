// `--permission` of node 24 does not cover SQLite, the network, V8's own log files and signals to other processes.
// The modules of `absent` are loaded by `poml` when it starts, and used for images and web pages alone. A template can
// replace methods such as `includes` and `call`, so what runs later uses operators and captured functions only.
'use strict';
const { Module, isBuiltin, registerHooks } = require('module');
const { apply } = Reflect;
const Refusal = Error;
const load = Module._load;
const named = (text) => {
  const names = Object.create(null);
  for (const name of text.split(' ')) names[name] = names['node:' + name] = true;
  return names;
};
const absent = named('dns http http2 https net sharp sqlite tls worker_threads');
const allowed = named('assert async_hooks buffer console crypto diagnostics_channel events fs os path perf_hooks ' +
  'querystring stream string_decoder url util util/types zlib');
const nothing = new Proxy(function () {}, {
  get: (target, name) => (name in target ? target[name] : typeof name === 'symbol' ? undefined : nothing),
  apply: () => nothing,
});
const check = (name) => {
  const isRefused = typeof name !== 'string' || (isBuiltin(name) && !(name in allowed));
  if (isRefused) throw new Refusal(`A template may not use ${typeof name === 'string' ? name : 'that'}.`);
};
Module._load = function (name, parent, isMain) {
  if (typeof name === 'string' && name in absent) return nothing;
  check(name);
  return apply(load, this, [name, parent, isMain]);
};
registerHooks({
  resolve(specifier, context, next) {
    let isRequired = false;
    for (let i = 0; i < context.conditions.length; i++) isRequired ||= context.conditions[i] === 'require';
    if (!isRequired) throw new Refusal(`A template may not import ${specifier}.`);
    const found = next(specifier, context);
    check(found.url);
    return found;
  },
});
const without = (owner, names) => names.split(' ').forEach((name) => delete owner[name]);
without(globalThis, 'EventSource WebSocket fetch');
without(Module, 'enableCompileCache flushCompileCache register registerHooks');
without(process, 'binding chdir dlopen execve getBuiltinModule kill loadEnvFile report _debugProcess _kill ' +
  '_linkedBinding');

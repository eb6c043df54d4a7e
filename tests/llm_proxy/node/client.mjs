// Calls the LLM proxy with OpenAI's client for Node in every way that it has, and prints what came of each as JSON.
// usage: NODE_CLIENTS=folder-with-node_modules node client.mjs BASE_URL

import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.NODE_CLIENTS, "here.js"));
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const model = "stub-model";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const says = (content) => [{ role: "user", content }];

const scenarios = {
  async chat() {
    const told = await client.chat.completions.create({ model, messages: says("Hello there") });
    return { text: told.choices[0].message.content, fields: Object.keys(told), choice: Object.keys(told.choices[0]) };
  },

  async tools() {
    const first = await client.chat.completions.create({ model, messages: says("use a tool"), tools });
    const call = first.choices[0].message.tool_calls[0];
    const result = { role: "tool", tool_call_id: call.id, content: "rain" };
    const messages = [...says("use a tool"), first.choices[0].message, result];
    const second = await client.chat.completions.create({ model, messages, tools });
    return { arguments: JSON.parse(call.function.arguments), text: second.choices[0].message.content };
  },

  async choices() {
    const told = await client.chat.completions.create({ model, messages: says("Hi"), n: 2 });
    return told.choices.map((choice) => choice.message.content);
  },

  async json() {
    const response_format = { type: "json_object" };
    const told = await client.chat.completions.parse({ model, messages: says("Hi"), response_format });
    return JSON.parse(told.choices[0].message.content);
  },

  async stream() {
    const stream = await client.chat.completions.create({ model, messages: says("Hello there"), stream: true });
    let text = "";
    let usage = 0;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage += chunk.usage ? 1 : 0;
    }
    return { text, usage };
  },

  async collected_stream() {
    const stream = client.chat.completions.stream({ model, messages: says("use a tool"), tools });
    const message = await stream.finalMessage();
    return { text: message.content, arguments: JSON.parse(message.tool_calls[0].function.arguments) };
  },

  async completion() {
    return (await client.completions.create({ model, prompt: "one two" })).choices[0].text;
  },

  async response() {
    return (await client.responses.create({ model, input: "Hello there" })).output_text;
  },

  async response_stream() {
    const stream = client.responses.stream({ model, input: "Hello there" });
    let text = "";
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return { text, final: (await stream.finalResponse()).output_text };
  },

  async embeddings() {
    const told = await client.embeddings.create({ model, input: ["a b", "c"] });
    return told.data.map((entry) => entry.embedding.length);
  },

  async models() {
    const names = [];
    for await (const listed of client.models.list()) names.push(listed.id);
    return { names, retrieved: (await client.models.retrieve(model)).id };
  },

  async raw() {
    const asked = client.chat.completions.create({ model, messages: says("Hi") });
    const { data, response } = await asked.withResponse();
    return { text: data.choices[0].message.content, status: response.status, id: response.headers.get("x-request-id") };
  },

  async errors() {
    const told = {};
    for (const status of [400, 401, 403, 404, 409, 422, 429, 500, 503]) {
      try {
        await client.chat.completions.create({ model, messages: says(`fail ${status}`) });
      } catch (error) {
        told[status] = [error.constructor.name, error.status, error.message.includes("no luck")];
      }
    }
    return told;
  },

  async error_in_stream() {
    const stream = await client.chat.completions.create({ model, messages: says("break"), stream: true });
    let text = "";
    try {
      for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
    } catch (error) {
      return { text, kind: error.constructor.name, message: error.message };
    }
  },

  async timeout() {
    try {
      await client.chat.completions.create({ model, messages: says("be late") }, { timeout: 200 });
    } catch (error) {
      return error.constructor.name;
    }
  },

  async abort() {
    const stream = await client.chat.completions.create({ model, messages: says("be slow"), stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) {
        stream.controller.abort();
        return chunk.choices[0].delta.content;
      }
    }
  },

  // The last: the proxy leaves a backend alone for as long as it wants.
  async retry_after() {
    try {
      await client.chat.completions.create({ model, messages: says("wait") });
    } catch (error) {
      return error.headers.get("retry-after");
    }
  },
};

const told = {};
for (const [name, scenario] of Object.entries(scenarios)) {
  try {
    told[name] = await scenario();
  } catch (error) {
    told[name] = { failed: `${error.constructor.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(told));

// The same agent in JavaScript: node agent.mjs
let task = "";
for await (const piece of process.stdin) task += piece;
const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  body: JSON.stringify({
    model: process.env.OPENAI_MODEL,
    max_tokens: 8,
    messages: [{ role: "user", content: JSON.parse(task) }],
  }),
});
if (!response.ok) throw new Error(`the model answered ${response.status}`);
const answer = (await response.json()).choices[0].message.content ?? "";
console.log(/[02468]$/.test(answer) ? 1 : 0);

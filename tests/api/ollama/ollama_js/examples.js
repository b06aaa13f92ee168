// What the ollama client for JavaScript makes of a chat, a stream, tools, a completion, structured output, the list of
// models and errors, as one JSON document.
// node examples.js HOST MODEL

import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const options = { temperature: 0, num_predict: 24 };
const found = {};

found.chat = await client.chat({ model, messages, options });

found.parts = [];
for await (const part of await client.chat({ model, messages, options, stream: true })) found.parts.push(part);

const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
found.called = await client.chat({ model, messages, tools, options });
const call = { function: { name: "get_weather", arguments: { city: "Rome" } } };
const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
const history = [...messages, { role: "assistant", content: "", tool_calls: [call] }, result];
found.answered = await client.chat({ model, messages: history, tools, options });

found.generated = await client.generate({ model, prompt: "The capital of France is", raw: true, options });
found.more = [];
for await (const part of await client.generate({ model, prompt: "Say hello.", options, stream: true })) {
  found.more.push(part);
}

const format = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
};
found.structured = await client.chat({ model, messages, format, options: { num_predict: 60 } });

found.list = await client.list();
found.show = await client.show({ model });
found.ps = await client.ps();
found.version = await client.version();
found.pulled = [];
for await (const part of await client.pull({ model, stream: true })) found.pulled.push(part);

found.errors = [];
for (const ask of [
  () => client.chat({ model: "nobody", messages }),
  () => client.copy({ source: model, destination: "other" }),
  () => client.delete({ model }),
]) {
  try {
    await ask();
  } catch (error) {
    found.errors.push({ status: error.status_code, message: error.message });
  }
}

const stream = await client.chat({ model, messages, stream: true, options: { temperature: 2, num_predict: 400 } });
found.aborted = null;
try {
  for await (const part of stream) stream.abort();
} catch (error) {
  found.aborted = error.name;
}

console.log(JSON.stringify(found));

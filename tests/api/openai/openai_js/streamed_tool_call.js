// Streams a chat in which the model must call a tool, and prints what the client made of it as one JSON document.
// node streamed_tool_call.js BASE_URL

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const [model] = (await client.models.list()).data;
const request = {
  model: model.id,
  messages: [{ role: "user", content: "What is the weather in Rome?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather of a city",
        parameters: {
          type: "object",
          properties: { city: { enum: ["Rome", "Oslo"] } },
          required: ["city"],
          additionalProperties: false,
        },
      },
    },
  ],
  tool_choice: "required",
  parallel_tool_calls: false,
  max_tokens: 60,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
};

const deltas = [];
for await (const chunk of await client.chat.completions.create(request)) {
  for (const choice of chunk.choices) deltas.push(...(choice.delta.tool_calls ?? []));
}

const { stream, ...whole } = request;
const runner = client.chat.completions.stream(whole);
const arguments_ = [];
runner.on("tool_calls.function.arguments.delta", (event) => arguments_.push(event.arguments_delta));
const final = await runner.finalChatCompletion();
console.log(JSON.stringify({ deltas, arguments: arguments_.join(""), final }));

// Streams a chat, then asks for a tool call, with the openai package for JavaScript.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL ?? "http://localhost:9000/v1", apiKey: "none" });
const model = process.env.MODEL ?? "vllm_model";

const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is the capital of France?" }],
    temperature: 0,
    seed: 1,
    stream: true,
});
for await (const chunk of stream) {
    process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
console.log();

const answer = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: [
        {
            type: "function",
            function: {
                name: "get_weather",
                description: "Get the weather in a city",
                parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
            },
        },
    ],
    tool_choice: "required",
    parallel_tool_calls: false,
    temperature: 0,
    max_completion_tokens: 64,
});
for (const call of answer.choices[0].message.tool_calls) {
    console.log(call.function.name, call.function.arguments);
}

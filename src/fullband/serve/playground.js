"use strict";
const $ = id => document.getElementById(id), MODES = ["standard", "soft", "fused"], shown = {};
for (const mode of MODES) {
  const box = document.createElement("article");
  box.innerHTML = `<h2>${mode[0].toUpperCase() + mode.slice(1)}</h2><pre aria-live="polite"></pre><p class="note"></p>`;
  $("modes").append(box);
  shown[mode] = { text: box.querySelector("pre"), note: box.querySelector("p"), tokens: [] };
}
const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: "Bearer " + $("key").value } : {}) });
async function about() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) { $("name").textContent = (await answer.json()).error.message; return; }
  const model = (await answer.json()).data[0];
  $("name").textContent = model.id;
  $("chat").disabled = !model.chat;
  $("chat").title = model.chat ? "" : "this model has no chat template";
}
$("key").addEventListener("change", about);
about();
function add(mode, piece, logprob) {
  const span = document.createElement("span"), place = shown[mode].tokens.length;
  span.textContent = piece;
  if (logprob !== null && logprob !== undefined) {
    span.style.backgroundColor = `rgba(179, 102, 27, ${Math.min(.55, -logprob / 8)})`;
    span.title = `probability ${Math.exp(logprob).toFixed(3)}`;
  }
  shown[mode].tokens.push(piece);
  shown[mode].text.append(span);
  mark();
}
function mark() {
  const plain = shown.standard.tokens;
  for (const mode of ["soft", "fused"]) {
    const own = shown[mode].tokens, spans = shown[mode].text.children;
    for (const span of spans) span.classList.remove("differs");
    for (let i = 0; i < Math.min(own.length, plain.length); i++) if (own[i] !== plain[i]) { spans[i].classList.add("differs"); break; }
  }
}
let stopping = null;
async function run(mode, signal) {
  const box = shown[mode], begun = performance.now();
  box.text.textContent = box.note.textContent = ""; box.tokens = [];
  const chat = $("chat").checked, passes = $("passes").value;
  const body = { mode, stream: true, stream_options: { include_usage: true }, max_tokens: +$("tokens").value, temperature: +$("temperature").value, seed: +$("seed").value };
  if (mode === "fused") body.feedback_passes = isNaN(passes) ? passes : +passes;
  if (chat) Object.assign(body, { messages: [{ role: "user", content: $("prompt").value }], logprobs: true });
  else Object.assign(body, { prompt: $("prompt").value, logprobs: 0 });
  try {
    const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "", reason = "", usage = null;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const lines = held.split("\n\n"); held = lines.pop();
      for (const line of lines) {
        const data = line.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage || usage;
        for (const choice of chunk.choices || []) {
          const text = chat ? choice.delta.content : choice.text;
          const found = choice.logprobs && (chat ? choice.logprobs.content.map(t => t.logprob) : choice.logprobs.token_logprobs);
          if (text || (found && found.length)) add(mode, text || "", found && found[0]);
          reason = choice.finish_reason || reason;
        }
      }
    }
    const runs = mode !== "fused" ? "without feedback" : isNaN(passes) ? passes : `${passes} feedback pass${passes === "1" ? "" : "es"}`, seconds = (performance.now() - begun) / 1000;
    box.note.textContent = `prompt: ${usage.prompt_tokens} tokens, ${runs}; ${usage.completion_tokens} new tokens, ended by ${reason}; ${seconds.toFixed(1)} s`;
  } catch (error) {
    box.note.textContent = error.name === "AbortError" ? "stopped" : error.message;
    box.note.classList.toggle("error", error.name !== "AbortError");
  }
}
$("go").addEventListener("click", async () => {
  stopping = new AbortController();
  $("go").disabled = true; $("stop").disabled = false;
  for (const mode of MODES) shown[mode].note.classList.remove("error");
  await Promise.all(MODES.map(mode => run(mode, stopping.signal)));
  $("go").disabled = false; $("stop").disabled = true;
});
$("stop").addEventListener("click", () => stopping && stopping.abort());
let view = null;
function draw() {
  const row = view.rows[+$("slider").value], first = view.rows[0];
  $("which").textContent = row.feedback_passes;
  $("shown").replaceChildren(...view.tokens.map((token, i) => {
    const span = document.createElement("span"), answer = row.answers && row.answers[i];
    span.textContent = answer === undefined || answer === null ? token : `${token} → ${answer}\n`;
    if (row.loss && row.loss[i] !== null) {
      span.style.backgroundColor = `rgba(179, 102, 27, ${Math.min(.55, row.loss[i] / 8)})`;
      span.title = `loss ${row.loss[i].toFixed(3)} nats, without feedback ${first.loss[i].toFixed(3)}`;
    }
    if (row.answers) span.style.color = answer === view.right[i] ? "#2a7d46" : "#c33";
    if (row.change && row.change[i] > .01) span.style.textDecoration = "underline";
    return span;
  }));
  if (row.answers) {
    const right = row.answers.filter((answer, i) => answer === view.right[i]).length;
    $("mean").textContent = `${right} of ${row.answers.length} answers right`;
  } else {
    const known = row.loss.filter(loss => loss !== null);
    $("mean").textContent = known.length ? `mean loss ${(known.reduce((a, b) => a + b, 0) / known.length).toFixed(4)} nats` : "";
  }
}
$("slider").addEventListener("input", draw);
$("look").addEventListener("click", async () => {
  const body = JSON.stringify({ text: $("text").value, feedback_passes: +$("most").value });
  const answer = await fetch("fullband/passes", { method: "POST", headers: headers(), body });
  const found = await answer.json();
  $("mean").classList.toggle("error", !answer.ok);
  if (!answer.ok) { $("mean").textContent = found.error.message; return; }
  view = found;
  $("slider").max = view.rows.length - 1; $("slider").disabled = false;
  draw();
});
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("go").click(); });

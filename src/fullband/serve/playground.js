"use strict";
// Tokens, losses and answers only ever become text nodes: what a model writes is shown, never run.
const $ = id => document.getElementById(id), MODES = ["standard", "soft", "fused"];
let server = null, stopping = null, view = null;

function make(tag, text = "", classes = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = classes;
  return made;
}
function say(place, text, isError = false) {
  place.textContent = text;
  place.classList.toggle("error", isError);
}

// ---- the server
async function send(path, body, signal) {
  const key = $("key").value, headers = { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
  let answer;
  try { answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal }); }
  catch (error) { throw error.name === "AbortError" ? error : new Error("the server does not answer"); }
  if (answer.status === 401) $("locked").hidden = false;
  if (answer.ok) return answer;
  let words = `${answer.status} ${answer.statusText}`;
  try { const told = await answer.json(); words = (told.error || told).message || told.detail || words; } catch { /* no JSON: the status says it */ }
  throw Object.assign(new Error(String(words).split("\n")[0]), { status: answer.status });
}
const ask = async (path, body, signal) => (await send(path, body, signal)).json();
async function about() {
  try { return await ask("fullband/about"); }
  catch (error) {
    if (error.status !== 404) throw error;
    const model = (await ask("v1/models")).data[0];  // an OpenAI server that only shows this page
    return { engine: "vllm", model: model.id, chat: true, mode: null, states: false, task: null };
  }
}
async function start() {
  try { server = await about(); }
  catch (error) { return say($("server"), error.message, true); }
  $("locked").hidden = !$("key").value;
  $("name").textContent = document.title = server.model;
  const vllm = server.engine !== "fullband";
  say($("server"), server.states ? "" : `Without the model's states, which ${vllm ? "vLLM's API does" : "this engine does"} not give, the page can't show what the carried ` +
    "state changes or a text by feedback passes: fullband serve --engine own does.");
  for (const id of ["shades", "given"]) $(id).hidden = !server.states;
  $("chats").hidden = !server.chat;
  if (!server.chat) $("chat").checked = false;
  if (vllm) for (const option of [...$("passes").options]) if (isNaN(option.value)) option.remove();  // vLLM takes numbers
  if (server.task) startGame();
  explainShade();
}
$("locked").addEventListener("submit", event => { event.preventDefault(); start(); });

// ---- one prompt in three modes
const panels = Object.fromEntries(MODES.map(mode => {
  const title = mode[0].toUpperCase() + mode.slice(1), box = make("article"), text = make("pre"), detail = make("p", "", "note"), note = make("p", "", "note");
  box.append(make("h3", title), text, detail, note);
  text.tabIndex = 0;
  text.setAttribute("aria-label", `Answer in ${title}; arrow keys go from token to token`);
  note.setAttribute("role", "status"); detail.setAttribute("aria-live", "polite");
  $("modes").append(box);
  const panel = { mode, title, text, detail, note, tokens: [], at: -1 };
  text.addEventListener("click", event => choose(panel, [...text.children].indexOf(event.target)));
  text.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); choose(panel, panel.at + step); }
  });
  return [mode, panel];
}));
const shading = () => document.querySelector("[name=shade]:checked").value;
const percent = logprob => Math.exp(logprob).toPrecision(3);
function explainShade() {
  say($("shade-note"), shading() === "logprob" ? "Shade: how unlikely a token was. Choose a token to see its probability." :
    "Shade: the token's probability with the state that was carried to its position against without it, after the same history. Blue: the state made it " +
    "more likely; brown: less. Standard has none.");
}
function describe(panel, token) {
  const name = token.text ? JSON.stringify(token.text) : token.ends ? "the end" : `part of a character (id ${token.id})`;
  const delta = token.carried && `, without the carried state ${percent(token.carried.without)}`;
  return token.logprob === null ? name : `${name}: probability ${percent(token.logprob)}${delta || ""}`;
}
function choose(panel, place) {
  const spans = panel.text.children;
  if (!spans[place]) return;
  spans[panel.at]?.classList.remove("at");
  spans[panel.at = place].classList.add("at");
  spans[place].scrollIntoView({ block: "nearest" });
  panel.detail.textContent = `token ${place}, ${describe(panel, panel.tokens[place])}`;
}
function paint(panel, place) {
  const token = panel.tokens[place], span = panel.text.children[place], { carried, logprob } = token;
  let color = "";
  if (shading() === "logprob" && logprob !== null) color = `rgb(var(--warm) / ${Math.min(.55, -logprob / 8)})`;
  if (shading() === "carried" && carried) {
    const delta = carried.with - carried.without;
    color = `rgb(var(--${delta > 0 ? "cool" : "warm"}) / ${Math.min(.6, Math.abs(delta) / 4)})`;
  }
  span.style.backgroundColor = color;
  span.title = describe(panel, token);
}
function add(panel, token) {
  panel.tokens.push(token);
  panel.text.append(make("span", token.text, token.text ? "" : token.ends ? "end" : "half"));
  paint(panel, panel.tokens.length - 1);
  for (const mode of MODES) markDifference(panels[mode]);
}
function firstDifference(panel) {  // null = none so far
  const own = panel.tokens, plain = panels.standard.tokens, same = (a, b) => a.id === undefined ? a.text === b.text : a.id === b.id;
  for (let i = 0; i < Math.min(own.length, plain.length); i++) if (!same(own[i], plain[i])) return i;
  const ended = panel.done && panels.standard.done && own.length !== plain.length;
  return ended ? Math.min(own.length, plain.length) : null;
}
function markDifference(panel) {
  const place = panel.mode === "standard" ? null : firstDifference(panel), marked = panel.text.querySelector(".differs"), span = panel.text.children[place];
  if (marked !== span) { marked?.classList.remove("differs"); span?.classList.add("differs"); }
}
const passesOf = text => isNaN(text) ? text : +text;
function ways(mode) {  // ours takes them beside OpenAI's fields, vLLM in a field of its own
  const own = mode === "fused" ? { mode, feedback_passes: passesOf($("passes").value) } : { mode };
  return server.engine === "fullband" ? own : { vllm_xargs: own };
}
async function generate(panel, signal) {
  const begun = performance.now(), chat = $("chat").checked, prompt = $("prompt").value;
  const asked = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const numbers = { max_tokens: +$("tokens").value, temperature: +$("temperature").value, seed: +$("seed").value };
  Object.assign(panel, { tokens: [], at: -1, done: false, carried: null, reason: null, asked, passes: panel.mode === "fused" ? passesOf($("passes").value) : 0, usage: null });
  panel.text.textContent = panel.detail.textContent = "";
  say(panel.note, "…");
  const body = { model: server.model, ...asked, ...numbers, ...ways(panel.mode), stream: true, stream_options: { include_usage: true }, logprobs: chat || 0, return_token_ids: true };
  const answer = await send(chat ? "v1/chat/completions" : "v1/completions", body, signal);
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    panel.usage = chunk.usage || panel.usage;
    for (const choice of chunk.choices || []) {
      if (choice.prompt_token_ids) panel.asked = { prompt: choice.prompt_token_ids };
      take(panel, choice, (chat ? choice.delta.content : choice.text) || "");
      panel.reason = choice.finish_reason || panel.reason;
    }
  }
  if (!panel.reason) throw new Error("the answer was cut off");
  panel.done = true;
  panel.seconds = (performance.now() - begun) / 1000;
  if (server.states && panel.passes === "converged") await getCarried(panel, signal);  // how many positions that took depends on the text
  for (const mode of MODES) if (panels[mode].done) { markDifference(panels[mode]); say(panels[mode].note, cost(panels[mode])); }
}
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data:") && line.trim() !== "data: [DONE]") yield JSON.parse(line.slice(5));
  }
}
function take(panel, choice, text) {  // a chunk may have several tokens, or text that completes a character begun by earlier ones
  const given = choice.logprobs || {}, ids = choice.token_ids || [];
  const names = given.content ? given.content.map(each => each.token) : given.tokens || [];
  const logprobs = given.content ? given.content.map(each => each.logprob) : given.token_logprobs || [];
  const count = Math.max(names.length, ids.length, text ? 1 : 0), apart = names.length === count && names.join("") === text;
  for (let i = 0; i < count; i++) {
    const last = i === count - 1, piece = apart ? names[i] : last ? text : "";
    add(panel, { text: piece, id: ids[i], logprob: logprobs[i] ?? null, ends: last && choice.finish_reason === "stop" });
  }
}
function cost(panel) {
  const { usage, passes } = panel, prompt = usage?.prompt_tokens, kept = usage?.prompt_tokens_details?.cached_tokens || 0, answer = Math.max(0, panel.tokens.length - 1);
  const end = `${panel.tokens.length} new tokens, ended by ${panel.reason === "stop" ? "a stop token" : panel.reason}; ${panel.seconds.toFixed(1)} s`;
  const place = panel.mode === "standard" ? null : firstDifference(panel);
  const apart = panel.mode === "standard" || !panels.standard.done ? "" : place === null ? "; same as Standard" : `; differs from Standard at token ${place}`;
  if (!prompt) return end + apart;
  const runs = isNaN(passes) ? 1 : 1 + passes, counted = passes === "converged" ? panel.carried?.prompt_positions : (prompt - kept) * runs;
  const rest = kept && passes !== "converged" ? `(${prompt} − ${kept} kept from before)` : prompt;
  const how = passes === "converged" ? (counted ? `${counted} until its ${prompt} states settled` : `${prompt} until its states settled`) :
    passes === "exact" ? `${rest}, one at a time` : `${rest} × ${runs} pass${runs > 1 ? "es" : ""}`;
  return `${counted === undefined ? "" : `${counted + answer} `}positions computed: prompt ${how} + answer ${answer}; ${end}${apart}`;
}
async function getCarried(panel, signal) {
  if (!panel.carried && panel.mode !== "standard" && panel.tokens.length && panel.tokens.every(token => token.id !== undefined)) {
    const own = { mode: panel.mode, ...(panel.mode === "fused" ? { feedback_passes: panel.passes } : {}) };
    panel.carried = await ask("fullband/carried", { ...panel.asked, answer: panel.tokens.map(token => token.id), ...own }, signal);
    panel.tokens.forEach((token, i) => { token.carried = { with: panel.carried.with[i], without: panel.carried.without[i] }; });
  }
}
async function shadePanel(panel, signal) {
  if (shading() === "carried") {
    if (panel.mode === "standard") panel.detail.textContent = "Standard carries no state.";
    else await getCarried(panel, signal);
  }
  panel.tokens.forEach((_, place) => paint(panel, place));
}
async function together(work) {  // in all panels; Stop ends it
  if (!server || stopping) return;
  const { signal } = stopping = new AbortController();
  $("go").disabled = true; $("stop").disabled = false;
  await Promise.all(MODES.map(async mode => {
    const panel = panels[mode];
    panel.text.setAttribute("aria-busy", "true");
    try { await work(panel, signal); await shadePanel(panel, signal); }
    catch (error) { say(panel.note, signal.aborted ? "stopped" : error.message, !signal.aborted); }
    panel.text.removeAttribute("aria-busy");
  }));
  stopping = null;
  $("go").disabled = false; $("stop").disabled = true;
}
$("go").addEventListener("click", () => together(generate));
$("stop").addEventListener("click", () => stopping?.abort());
$("shades").addEventListener("change", () => { explainShade(); together(() => null); });
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("go").click(); });

// ---- a given text by feedback passes, and the game of a built-in task
const label = name => {  // a state of a task: where A, B, C lie, for permutations
  const permutation = server.task.permutations?.[server.task.tokens.indexOf(name)];
  return permutation ? permutation.reduce((lie, to, from) => { lie[to] = "ABCDE"[from]; return lie; }, []).join("") : name;
};
function picture(name) {  // lines from where things lie to where a step takes them
  const permutation = server.task.permutations?.[server.task.tokens.indexOf(name)];
  if (!permutation) return make("span", name);
  const svg = $("blank").cloneNode(), wide = 12 * permutation.length;
  for (const [key, value] of Object.entries({ width: wide, height: 20, viewBox: `0 0 ${wide} 20`, "stroke-width": 1.6, "aria-hidden": true })) svg.setAttribute(key, value);
  svg.removeAttribute("id"); svg.removeAttribute("hidden");
  permutation.forEach((to, from) => {
    const line = document.createElementNS(svg.namespaceURI, "path");
    line.setAttribute("d", `M${6 + 12 * from} 1C${6 + 12 * from} 10 ${6 + 12 * to} 10 ${6 + 12 * to} 19`);
    svg.append(line);
  });
  return svg;
}
const randomWord = length => Array.from({ length }, () => server.task.tokens[Math.floor(Math.random() * server.task.tokens.length)]).join(" ");
function startGame() {
  const { tokens, permutations } = server.task;
  document.querySelector("main").prepend($("given"));
  $("given-title").textContent = `The ${permutations ? "product" : "counting"} game (${server.task.name}), by feedback passes`;
  $("text-label").textContent = "Word";
  say($("given-note"), (permutations ? "A step moves what lies in each place as its lines show. The model is given the steps alone and says after each how A, B, C, … lie now. " :
    "The model is given operations and says the state after each. ") + "Green and ✓: right; red and ✗: wrong. 0 feedback passes: Standard, and Soft's prompt; more: Fused.");
  $("game").hidden = false;
  $("moves").hidden = tokens.length > 24;
  const undo = make("button", "undo"), buttons = tokens.length > 24 ? [] : tokens.map(name => {
    const button = make("button");
    button.append(picture(name), ...(permutations ? [make("span", name)] : []));
    button.setAttribute("aria-label", `step ${name}` + (permutations ? `, which makes ABC${"DE".slice(0, permutations[0].length - 3)} ${label(name)}` : ""));
    button.addEventListener("click", () => { $("text").value = ($("text").value.trim() + " " + name).trim(); look(); });
    return button;
  });
  undo.addEventListener("click", () => { $("text").value = $("text").value.trim().split(/\s+/).slice(0, -1).join(" "); if ($("text").value) look(); });
  $("moves").replaceChildren(...buttons, undo);
  $("length").max = Math.min(1024, server.max_model_len);
  $("length").value = Math.min(32, server.max_model_len);
  $("most").value = 16;
  $("prompt").value = randomWord(8);
  $("random").click();
}
$("random").addEventListener("click", () => { $("text").value = randomWord(Math.max(1, Math.min(+$("length").value, 1024))); look(); });
let asking = null;
async function look() {
  asking?.abort();
  const { signal } = asking = new AbortController();
  say($("mean"), "…");
  try {
    const most = +$("most").value, found = await ask("fullband/passes", { text: $("text").value, feedback_passes: most }, signal), before = view && view.rows.length;
    view = found;
    for (const place of document.querySelectorAll("#view, figure")) place.hidden = false;
    $("against").hidden = $("steps").hidden = !view.right; $("against").hidden = Boolean(view.right); $("read").hidden = Boolean(view.right);
    $("slider").max = view.rows.length - 1;
    if (before !== view.rows.length) $("slider").value = view.right ? 0 : view.rows.length - 1;
    show();
  } catch (error) { if (!signal.aborted) say($("mean"), error.message, true); }
}
$("look").addEventListener("click", look);
const passesIn = row => `${row.feedback_passes}${view.right ? (row.feedback_passes === 0 ? " (Standard)" : " (Fused)") : ""}`;
const mean = values => { const known = values.filter(value => value !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
const rightIn = row => row.answers.filter((answer, i) => answer === view.right[i]).length;
function show() {
  const row = view.rows[+$("slider").value];
  $("which").textContent = passesIn(row);
  $("slider").setAttribute("aria-valuetext", `${passesIn(row)} feedback passes`);
  if (view.right) showSteps(row); else showText(row);
  drawMaps();
}
$("slider").addEventListener("input", show);
function showText(row) {
  const first = view.rows[0], exact = view.rows.at(-1), own = mean(row.loss);
  $("shown").replaceChildren(...view.tokens.map((token, i) => {
    const isPart = /^token_id:\d+$/.test(token), span = make("span", isPart ? "" : token, isPart ? "half" : "");
    span.title = row.loss[i] === null ? token : `${token}: loss ${row.loss[i].toFixed(3)} nats, without feedback ${first.loss[i].toFixed(3)}`;
    if (row.loss[i] !== null) span.style.backgroundColor = `rgb(var(--warm) / ${Math.min(.55, row.loss[i] / 8)})`;
    if (row.change && row.change[i] > .01) span.style.textDecoration = "underline";
    return span;
  }));
  say($("mean"), own === null ? "a single token has no loss" : `mean loss ${own.toFixed(4)} nats; without feedback ${mean(first.loss).toFixed(4)}, exact ${mean(exact.loss).toFixed(4)}`);
}
function showSteps(row) {
  $("steps").replaceChildren(...view.tokens.map((token, i) => {
    const right = row.answers[i] === view.right[i], step = make("li", "", right ? "right" : "wrong");
    step.append(picture(token), make("span", `${label(row.answers[i])} ${right ? "✓" : "✗"}`));
    if (!right) step.append(make("small", `is ${label(view.right[i])}`));
    step.title = `step ${i}: ${token}`;
    return step;
  }));
  const wrong = row.answers.findIndex((answer, i) => answer !== view.right[i]);
  say($("mean"), `${rightIn(row)} of ${row.answers.length} answers right` + (wrong < 0 ? "" : `; the first wrong one is at step ${wrong}`));
}
function drawMaps() {
  const exact = view.rows.at(-1), diff = $("diff").checked;
  const results = view.right ? view.rows.map(row => `${rightIn(row)}/${view.right.length}`) : view.rows.map(row => mean(row.loss)?.toFixed(3) ?? "");
  $("map-title").textContent = view.right ? "Right and wrong answers; how many are right" : `Loss of each token${diff ? " less that of exact evaluation (darkest: 1 nat)" : " (darkest: 8 nats)"}; the mean at the right`;
  drawMap($("map"), results, (row, i) => {
    if (view.right) return row.answers[i] === view.right[i] ? ["good", .75] : ["bad", .75];
    if (row.loss[i] === null) return null;
    const off = row.loss[i] - exact.loss[i];
    return diff ? [off > 0 ? "warm" : "cool", Math.abs(off)] : ["warm", row.loss[i] / 8];
  });
  const moved = view.rows.map(row => row.change ? Math.max(...row.change).toPrecision(1) : "");
  drawMap($("settling"), moved, (row, i) => row.change && row.change[i] > 1e-4 ? ["cool", 1 + Math.log10(row.change[i]) / 4] : null);
}
function drawMap(canvas, results, cell) {
  const rows = view.rows, columns = view.tokens.length, high = Math.max(6, Math.min(18, 320 / rows.length)), every = Math.ceil(12 / high), wide = canvas.parentElement.clientWidth;
  const left = 44, width = wide - left - 56, scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  canvas.width = wide * scale; canvas.height = (high * rows.length + 4) * scale;
  canvas.style.height = `${high * rows.length + 4}px`;
  canvas.setAttribute("aria-label", rows.map((row, i) => `${row.feedback_passes}: ${results[i]}`).join(", "));
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  const colors = Object.fromEntries(["warm", "cool", "good", "bad"].map(key => [key, style.getPropertyValue(`--${key}`)])), gap = width / columns > 4 ? 1 : 0;
  rows.forEach((row, y) => {
    const top = 2 + y * high, chosen = y === +$("slider").value;
    for (let i = 0; i < columns; i++) {
      const found = cell(row, i);
      if (!found) continue;
      pen.fillStyle = `rgb(${colors[found[0]]} / ${Math.min(1, found[1])})`;
      pen.fillRect(left + i * width / columns, top, width / columns - gap, high - (high > 9 ? 1 : 0));
    }
    pen.fillStyle = pen.strokeStyle = style.color;
    if (chosen) pen.strokeRect(left - 1, top - 1, width + 1, high + 1);
    if (chosen || y === rows.length - 1 || (y % every === 0 && y < rows.length - every)) {
      pen.textAlign = "right"; pen.fillText(row.feedback_passes, left - 5, top + high / 2);
      pen.textAlign = "left"; pen.fillText(results[y], left + width + 5, top + high / 2);
    }
  });
}
for (const canvas of [$("map"), $("settling")]) canvas.addEventListener("click", event => {
  $("slider").value = Math.floor((event.offsetY - 2) / (canvas.clientHeight - 4) * view.rows.length);
  show();
});
$("diff").addEventListener("change", drawMaps);
new ResizeObserver(() => view && drawMaps()).observe($("given"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && drawMaps());
start();

"use strict";
// The page of `rooftop scene view`. It collects moves from mouse and keys, and requests the next picture when the
// previous picture has arrived. The reply also contains the moved view, because the server computes all camera moves
// (viewpoints.py).

const element = (id) => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token") ?? "";
const tab = Math.random().toString(36).slice(2);
const REST_MS = 180;  // time without movement after which a picture of full size is requested
// scales of the picture while the view moves; only a few, so that the renderer can reuse its memory
const SCALES = [1, 1 / 2, 1 / 3, 1 / 4];
// While the view moves, the scale adapts: if a picture takes longer than SLOW_MS, the next picture is one scale
// smaller. If a picture at the next larger scale is expected to take less than QUICK_MS, that scale is used.
const SLOW_MS = 120, QUICK_MS = 80;
const ORBIT_DEGREES = 180;  // rotation by a drag over the picture's height
const LONGEST_STEP_S = 0.25;  // maximum flying time between two pictures, even if a picture takes longer
const FLIGHT_SIZES = 0.15;  // flying speed at slider value 0, in sizes of the scene per second

const canvas = element("picture"), pen = canvas.getContext("2d", { alpha: false });
const root = document.documentElement;
let facts = null;       // facts about the scene, from the server
let view = null;        // eye, target, up, fov_y_degrees; null is the home view
let framed = false;     // whether the next picture must show the whole scene
let light = null;       // direction in the world; null is the default light
let pixelError = null;
let pending = still();  // movement since the last request
let latest = null;      // the last picture, as an ImageBitmap
let scale = 1;          // index into SCALES
let changed = true, changedAt = 0;
let changes = 0;        // number of changes; a picture shows all changes that were made before its request
let state = "changing"; // or "sharp", or "failed": no request until the next change
let wake = () => {};    // wakes the loop
let breakOff = null;    // aborts the pending request of a picture of full size
let path = null, recording = null, replaying = null;

function still() {
  return { orbit_degrees: [0, 0], look_degrees: [0, 0], pan_heights: [0, 0], zoom_doublings: [0], fly: [0, 0, 0] };
}

function add(moved) {
  for (const [name, amounts] of Object.entries(moved)) amounts.forEach((amount, axis) => { pending[name][axis] += amount; });
}

// ---- talking to the server -----------------------------------------------------------------------------------------
async function ask(route, body, signal) {
  const post = body === undefined ? {} : { method: "POST", body: typeof body === "string" ? body : JSON.stringify(body) };
  let reply;
  try {
    reply = await fetch(route, { headers: { Authorization: `Bearer ${token}` }, signal, ...post });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The server does not answer. Is `rooftop scene view` still running, and the tunnel open?"), { lost: true });
  }
  if (reply.status === 204) return null;  // a newer request has replaced this one
  if (!reply.ok) {
    const said = await reply.json().catch(() => ({}));
    throw new Error(said.error ?? `The server answers ${reply.status}.`);
  }
  return reply;
}

function complain(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

const fullSize = () => {
  const box = canvas.getBoundingClientRect(), ratio = Math.min(devicePixelRatio, 2);
  const fit = Math.min(1, Math.sqrt((facts?.most_pixels ?? 1e7) / Math.max(1, box.width * box.height * ratio * ratio)));
  return [box.width, box.height].map((side) => Math.max(1, Math.floor(side * ratio * fit)));
};
const scaled = (size, by) => size.map((side) => Math.max(1, Math.round(side * by)));
const wanted = (size, extra) => ({ tab, view, size, window: fullSize(), show: element("show").value, light, pixel_error: pixelError, ...extra });

// ---- the loop ------------------------------------------------------------------------------------------------------
function setState(name) {
  state = name;
  canvas.dataset.state = name;
}

function markChange() {
  changed = true;
  changedAt = performance.now();
  changes += 1;
  canvas.dataset.changes = changes;
  setState("changing");
}

function change() {
  markChange();
  breakOff?.abort();
  wake();
}

async function run() {
  for (;;) {
    follow();
    const resting = performance.now() - changedAt;
    if (changed) await draw(SCALES[scale], 78);
    else if (state === "changing" && resting >= REST_MS) await draw(1, 92);
    else {
      const rest = state === "changing" ? REST_MS - resting : 1e9;
      await new Promise((resolve) => { const timer = setTimeout(resolve, Math.min(rest, 2e9)); wake = () => { clearTimeout(timer); resolve(); }; });
      wake = () => {};
    }
  }
}

async function draw(by, quality) {
  const full = by === 1 && quality > 90, size = fullSize(), began = performance.now();
  const move = Object.fromEntries(Object.entries(pending).filter(([, amounts]) => amounts.some((amount) => amount !== 0)));
  const request = wanted(scaled(size, by), { move, framed, quality }), asked = changes;
  const askAgain = () => {  // repeat the moves in the next request, because this request returned no picture
    if (view !== request.view) return;  // the home button or a path has set the view in the meantime
    add(move);
    framed ||= request.framed;
  };
  pending = still();
  framed = changed = false;
  breakOff = full ? new AbortController() : null;
  try {
    const reply = await ask("/frame", request, breakOff?.signal);
    if (!reply) return askAgain();
    const [about, bitmap] = [JSON.parse(reply.headers.get("Rooftop-Frame")), await createImageBitmap(await reply.blob())];
    latest?.close();
    latest = bitmap;
    if (view === request.view) view = about.view;  // if not, the home button or a path has set it in the meantime
    complain("");
    paint();
    keep();
    report(about, performance.now() - began, full);
    canvas.dataset.shown = asked;
    if (full && !changed && !comesMore(about.stats)) setState("sharp");
    if (!full) adapt(performance.now() - began);
  } catch (error) {
    if (error.name === "AbortError") return askAgain();
    complain(error.message);
    if (error.lost) {
      askAgain();
      await new Promise((resolve) => setTimeout(resolve, 1500));
      changed = true;
    } else if (!changed) setState("failed");
  } finally {
    breakOff = null;
  }
}

// Whether pages that make the picture finer are being loaded. If the pool is too small, some pages are always missing.
let framesWithoutPages = 0;
function comesMore({ streaming }) {
  framesWithoutPages = streaming?.loaded ? 0 : framesWithoutPages + 1;
  return Boolean(streaming?.missing) && framesWithoutPages < 20;
}

function adapt(ms) {
  const finer = SCALES[scale - 1] / SCALES[scale];
  if (ms > SLOW_MS && scale < SCALES.length - 1) scale += 1;
  else if (scale > 0 && ms * finer * finer < QUICK_MS) scale -= 1;
}

function paint() {
  const [width, height] = fullSize();
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  if (!latest) return;
  pen.imageSmoothingEnabled = true;
  pen.drawImage(latest, 0, 0, canvas.width, canvas.height);
  paintLight();
}

// ---- mouse, touch, keys --------------------------------------------------------------------------------------------
const pointers = new Map(), held = new Set();
let looks = false;  // whether a drag looks around instead of orbiting

function move(name, ...amounts) {
  stopReplay();
  add({ [name]: amounts });
  change();
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  canvas.focus({ preventScroll: true });
  canvas.classList.add("held");
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const now = [event.clientX, event.clientY], height = canvas.clientHeight;
  const [right, down] = [(now[0] - before[0]) / height, (now[1] - before[1]) / height];
  const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
  pointers.set(event.pointerId, now);
  if (other) {  // two fingers: pan, and zoom in as they move apart
    const apart = (point) => Math.max(1, Math.hypot(point[0] - other[0], point[1] - other[1]));
    move("pan_heights", right / 2, down / 2);
    move("zoom_doublings", Math.log2(apart(before) / apart(now)));
  } else if (event.buttons & 6 || event.shiftKey) move("pan_heights", right, down);
  else if (looks !== event.altKey) move("look_degrees", right * 1.5 * fov(), down * 1.5 * fov());
  else move("orbit_degrees", right * ORBIT_DEGREES, down * ORBIT_DEGREES);
});
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
  pointers.delete(event.pointerId);
  if (!pointers.size) canvas.classList.remove("held");
});
canvas.addEventListener("contextmenu", (event) => event.preventDefault());
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const steps = event.deltaY * (event.deltaMode ? 16 : 1) / 400;
  if (looks) move("fly", 0, 0, -steps * speed());
  else move("zoom_doublings", steps);
}, { passive: false });
canvas.addEventListener("dblclick", async (event) => {
  const box = canvas.getBoundingClientRect(), size = fullSize();
  const at = [event.clientX - box.left, event.clientY - box.top].map((place, axis) =>
    Math.min(size[axis] - 1, Math.max(0, Math.floor(place / (axis ? box.height : box.width) * size[axis]))));
  try {
    const found = await (await ask("/point", wanted(size, { at })))?.json();
    if (!found?.point) return;
    view = found.view;
    change();
  } catch (error) { complain(error.message); }
});

const fov = () => view?.fov_y_degrees ?? 50;
const speed = () => (facts?.size ?? 1) * FLIGHT_SIZES * 2 ** Number(element("speed").value);
const FLY = { KeyW: [0, 0, 1], KeyS: [0, 0, -1], KeyA: [-1, 0, 0], KeyD: [1, 0, 0], KeyE: [0, 1, 0], KeyQ: [0, -1, 0] };
const TURN = { ArrowLeft: [-7.5, 0], ArrowRight: [7.5, 0], ArrowUp: [0, -7.5], ArrowDown: [0, 7.5] };
const KEYS = {
  f: () => element("frame").click(), h: () => element("home").click(), l: () => element("lightHere").click(),
  o: () => setLooks(!looks), p: () => element("screenshot").click(), r: () => element("record").click(),
  " ": () => element("replay").click(), "?": () => element("keys").showModal(), "\\": () => showPanel(element("panel").hidden),
  "[": () => faster(-1), "]": () => faster(1),
};
let flownAt = 0, quick = false;

window.addEventListener("keydown", (event) => {
  if (quick !== event.shiftKey) fly();
  quick = event.shiftKey;
  const typing = event.target.matches("select, input, button, #light, dialog *") && event.target !== canvas;
  if (event.ctrlKey || event.metaKey || event.altKey || element("keys").open) return;
  if (typing && (event.key === " " || event.key === "Enter" || event.code.startsWith("Arrow") || event.target.matches("select"))) return;
  if (FLY[event.code]) {
    fly();
    held.add(event.code);
    stopReplay();
    change();
  } else if (TURN[event.code]) move("orbit_degrees", ...TURN[event.code]);
  else if (/^[1-9]$/.test(event.key) && facts?.modes[event.key - 1]) setShow(facts.modes[event.key - 1].name);
  else if (KEYS[event.key.toLowerCase()] && !event.repeat) KEYS[event.key.toLowerCase()]();
  else return;
  event.preventDefault();
});
window.addEventListener("keyup", (event) => {
  fly();
  quick = event.shiftKey;
  held.delete(event.code);
});
window.addEventListener("blur", () => { fly(); held.clear(); });

// Add the flight of all held keys since the previous call. A key that is released while a picture is drawn is also
// counted.
function fly() {
  const now = performance.now();
  const far = speed() * (quick ? 4 : 1) * Math.min((now - flownAt) / 1000, LONGEST_STEP_S);
  for (const code of held) add({ fly: FLY[code].map((way) => way * far) });
  flownAt = now;
  if (held.size) markChange();
}

// Update the view where it changes without events: while keys for flying are held, and during a replay.
function follow() {
  const now = performance.now();
  if (held.size) fly();
  if (replaying !== null) {
    const seconds = path.views[0].seconds + (now - replaying) / 1000;
    view = viewAt(seconds);
    markChange();
    if (seconds >= path.views.at(-1).seconds) stopReplay();
  }
}

// ---- path: interpolated as in recorded_paths.py ------------------------------------------------------------------
const VIEW = ["eye", "target", "up", "fov_y_degrees"];
const viewOf = (sample) => Object.fromEntries(VIEW.map((name) => [name, sample[name]]));

function viewAt(seconds) {
  const after = path.views.findIndex((sample) => sample.seconds > seconds);
  if (after <= 0) return viewOf(after < 0 ? path.views.at(-1) : path.views[0]);
  const [a, b] = path.views.slice(after - 1, after + 1), share = (seconds - a.seconds) / (b.seconds - a.seconds);
  const between = (from, to) => from + share * (to - from);
  return Object.fromEntries(VIEW.map((name) =>
    [name, Array.isArray(a[name]) ? a[name].map((from, axis) => between(from, b[name][axis])) : between(a[name], b[name])]));
}

function keep() {
  if (!recording || !view) return;
  const seconds = (performance.now() - recording.began) / 1000;
  if (recording.views.at(-1)?.seconds >= seconds) recording.views.pop();  // some browsers' clocks advance in coarse steps
  recording.views.push({ seconds, ...viewOf(view) });
  element("pathText").textContent = `recording: ${seconds.toFixed(1)} s, ${recording.views.length} views`;
}

function setPath(found) {
  path = found;
  const seconds = path.views.at(-1).seconds - path.views[0].seconds;
  element("pathText").textContent = `path: ${seconds.toFixed(1)} s, ${path.views.length} views`;
  element("replay").disabled = element("download").disabled = false;
}

function stopReplay() {
  replaying = null;
  element("replay").textContent = "Replay";
}

element("record").addEventListener("click", () => {
  if (recording) {
    keep();
    const { views } = recording;
    recording = null;
    if (views.length) setPath({ rooftop_path: 1, views });
  } else {
    stopReplay();
    recording = { began: performance.now(), views: [] };
    keep();
  }
  element("record").textContent = recording ? "Stop recording" : "Record path";
  element("record").setAttribute("aria-pressed", String(recording !== null));
});
element("replay").addEventListener("click", () => {
  if (!path) return;
  if (replaying !== null) return stopReplay();
  replaying = performance.now();
  element("replay").textContent = "Stop";
  change();
});
element("download").addEventListener("click", () => save(new Blob([JSON.stringify(path)], { type: "application/json" }), "path.json"));
element("load").addEventListener("click", () => element("file").click());
element("file").addEventListener("change", async () => {
  const [file] = element("file").files;
  element("file").value = "";
  if (!file) return;
  try {
    setPath(await (await ask("/path", await file.text())).json());
    complain("");
  } catch (error) { complain(`${file.name}: ${error.message}`); }
});

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

element("screenshot").addEventListener("click", async () => {
  try {
    const reply = await ask("/frame", wanted(fullSize(), { tab: `${tab}-png`, format: "png" }));
    if (reply) save(await reply.blob(), `${facts.files[0].replace(/\.rtg$/, "")}-${element("show").value}.png`);
  } catch (error) { complain(error.message); }
});

// ---- light: a ball as the camera sees it; its bright spot faces the light ------------------------------------------
const ball = element("light"), chalk = ball.getContext("2d");
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const unit = (a) => { const length = Math.hypot(...a) || 1; return a.map((part) => part / length); };

// The unit vectors right, up and towards the camera, in the world.
function axes() {
  const toward = unit(view.eye.map((part, axis) => part - view.target[axis]));
  const right = unit(cross(view.up, toward));
  return [right, cross(toward, right), toward];
}

function paintLight() {
  if (!view || !facts) return;
  const from = unit(light ?? facts.light), [x, y, z] = axes().map((axis) => dot(axis, from));
  ball.title = `--light ${from.map((part) => part.toFixed(3)).join(",")}`;
  const middle = ball.width / 2, radius = middle - 3;
  const shade = chalk.createRadialGradient(middle + x * radius * 0.8, middle - y * radius * 0.8, 2, middle, middle, radius * 1.25);
  shade.addColorStop(0, z > 0 ? "#fff6df" : "#59626b");
  shade.addColorStop(0.5, z > 0 ? "#a8a08c" : "#3c444c");
  shade.addColorStop(1, "#2a2f36");
  chalk.clearRect(0, 0, ball.width, ball.height);
  chalk.beginPath();
  chalk.arc(middle, middle, radius, 0, 7);
  chalk.fillStyle = shade;
  chalk.fill();
  chalk.beginPath();
  chalk.arc(middle + x * radius * 0.92, middle - y * radius * 0.92, 7, 0, 7);
  chalk.lineWidth = 3;
  chalk.strokeStyle = chalk.fillStyle = "#ecb54c";
  if (z > 0) chalk.fill(); else chalk.stroke();  // a ring if the light comes from behind
}

function setLight(x, y, z) {
  if (!view) return;
  const of = axes();
  light = [0, 1, 2].map((part) => x * of[0][part] + y * of[1][part] + z * of[2][part]);
  paintLight();
  change();
}

function dragLight(event) {
  const box = ball.getBoundingClientRect();
  let [x, y] = [2 * (event.clientX - box.left) / box.width - 1, 1 - 2 * (event.clientY - box.top) / box.height];
  const far = Math.hypot(x, y);
  if (far > 1) [x, y] = [x / far, y / far];
  setLight(x, y, Math.sqrt(Math.max(0, 1 - x * x - y * y)));
}
ball.addEventListener("pointerdown", (event) => { ball.setPointerCapture(event.pointerId); dragLight(event); });
ball.addEventListener("pointermove", (event) => { if (event.buttons) dragLight(event); });
ball.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, 0.2], ArrowDown: [0, -0.2] }[event.key];
  if (!step || !view) return;
  const [x, y, z] = axes().map((axis) => dot(axis, unit(light ?? facts.light)));
  setLight(...unit([x + step[0], y + step[1], Math.max(z, 0)]));
  event.preventDefault();
});
element("lightHere").addEventListener("click", () => setLight(0, 0, 1));
element("lightUsual").addEventListener("click", () => { light = null; paintLight(); change(); });

// ---- panel ---------------------------------------------------------------------------------------------------------
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
element("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
element("help").addEventListener("click", () => element("keys").showModal());

function showPanel(shown) {
  element("panel").hidden = !shown;
  element("open").hidden = shown;
}
element("close").addEventListener("click", () => showPanel(false));
element("open").addEventListener("click", () => showPanel(true));

function setLooks(on) {
  looks = on;
  element("orbit").setAttribute("aria-pressed", String(!on));
  element("fly").setAttribute("aria-pressed", String(on));
}
element("orbit").addEventListener("click", () => setLooks(false));
element("fly").addEventListener("click", () => setLooks(true));
element("home").addEventListener("click", () => { stopReplay(); view = null; change(); });
element("frame").addEventListener("click", () => { stopReplay(); framed = true; change(); });

function setShow(name) {
  element("show").value = name;
  const mode = facts.modes.find((each) => each.name === name);
  element("meaning").textContent = mode.meaning;
  element("legend").replaceChildren(...mode.legend.map(({ color, label }) => {
    const item = document.createElement("li");
    item.style.setProperty("--swatch", color);
    item.textContent = label || "\u00a0";
    return item;
  }));
  change();
}
element("show").addEventListener("change", () => setShow(element("show").value));
element("fov").addEventListener("input", () => {
  if (!view) return;
  stopReplay();
  view = { ...view, fov_y_degrees: Number(element("fov").value) };
  element("fovText").textContent = `${view.fov_y_degrees}°`;
  change();
});
element("detail").addEventListener("input", () => { pixelError = 2 ** Number(element("detail").value); showDetail(); change(); });
element("speed").addEventListener("input", showSpeed);

function showDetail() { element("detailText").textContent = `${Number(pixelError.toPrecision(2))} px`; }
function showSpeed() { element("speedText").textContent = `${Number(speed().toPrecision(2))}/s`; }
function faster(by) {
  element("speed").value = Number(element("speed").value) + by;
  showSpeed();
}

const count = (number) => number.toLocaleString("en");
const bytes = (number) => {
  const step = Math.min(4, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${(number / 2 ** (10 * step)).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
};
const milliseconds = (ms) => (ms >= 100 ? ms.toFixed(0) : ms.toFixed(ms >= 10 ? 1 : 2));
const runs = (numbers) => {  // consecutive numbers as ranges: 0, 1, 2, 5 as "0 to 2, 5"
  const found = [];
  for (const number of numbers) {
    if (found.at(-1)?.[1] === number - 1) found.at(-1)[1] = number; else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first} to ${last}`)).join(", ") || "none";
};

function row(label, value) {
  const line = document.createElement("tr"), [name, cell] = [document.createElement("th"), document.createElement("td")];
  name.textContent = label;
  cell.textContent = value;
  line.append(name, cell);
  return line;
}

const HOST = new Set(["colours", "jpeg", "png"]);  // times that the viewer adds to the renderer's stages
let arrivedAt = 0, between = 0;

function report(about, ms, full) {
  const stages = Object.entries(about.ms), most = Math.max(...stages.map(([, each]) => each), 1e-9);
  element("stages").tBodies[0].replaceChildren(...stages.map(([name, each]) => {
    const line = row(name.replaceAll("_", " "), milliseconds(each)), bar = document.createElement("td"), fill = document.createElement("i");
    line.lastChild.className = "number";
    line.classList.toggle("host", HOST.has(name));
    fill.style.width = `${100 * each / most}%`;
    bar.className = "bar";
    bar.append(fill);
    line.append(bar);
    return line;
  }));
  element("gpuMs").textContent = milliseconds(stages.reduce((sum, [name, each]) => sum + (HOST.has(name) ? 0 : each), 0));
  const now = performance.now();
  if (full || now - arrivedAt > 1000) between = 0; else between = between ? 0.8 * between + 0.2 * (now - arrivedAt) : now - arrivedAt;
  arrivedAt = now;
  if (between) element("rate").textContent = (1000 / between).toFixed(1);
  const { stats } = about;
  element("drawn").tBodies[0].replaceChildren(
    row("triangles drawn", count(stats.triangles)), row("clusters drawn", count(stats.clusters)),
    row("candidate groups", count(stats.groups)), row("nodes visited", count(stats.nodes)),
    row("hidden in the first pass", count(stats.occluded)),
    row("clusters of the second pass", count(stats.second_pass_clusters)),
    row("large triangles", count(stats.large_triangles)), row("levels of detail", runs(stats.levels)),
    ...(!stats.streaming ? [] : [
      row("pages resident", count(stats.streaming.resident)), row("pages missing", count(stats.streaming.missing)),
      row("surface error, pixels", Number(stats.streaming.error_pixels.toPrecision(3)))]),
    ...(stats.shadow_maps ? [row("shadow maps drawn", count(stats.shadow_maps))] : []),
    ...(about.memory_bytes === null ? [] : [row("memory on the device", bytes(about.memory_bytes))]));
  element("status").textContent = `${about.size.join(" × ")}${full ? "" : " while moving"} · ${milliseconds(ms)} ms from request to picture`;
  element("fov").value = about.view.fov_y_degrees;
  element("fovText").textContent = `${Number(about.view.fov_y_degrees.toFixed(1))}°`;
}

async function start() {
  for (;;) {
    try {
      facts = await (await ask("/scene")).json();
      break;
    } catch (error) {
      complain(error.message);
      if (!error.lost) return;
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }
  const names = facts.files.slice(0, 3).join(", ") + (facts.files.length > 3 ? ", …" : "");
  document.title = `${names}: rooftop scene view`;
  element("name").textContent = names;
  element("summary").textContent = `${count(facts.instanced_triangles)} triangles · ${facts.device}`;
  element("show").replaceChildren(...facts.modes.map(({ name, label }) => new Option(label, name)));
  pixelError = facts.pixel_error;
  element("detail").value = Math.round(Math.log2(Math.max(pixelError, 1 / 16)));
  showDetail();
  showSpeed();
  const size = facts.bounds[1].map((high, axis) => Number((high - facts.bounds[0][axis]).toPrecision(4)));
  element("scene").tBodies[0].replaceChildren(
    row("triangles", count(facts.triangles)), row("instances", count(facts.instances)), row("clusters", count(facts.clusters)),
    row("levels", count(facts.levels)), row("size", size.join(" × ")), row("files", bytes(facts.bytes)),
    row("pages", count(facts.pages)), row("of them resident", facts.streamed ? "as frames need them" : "all"),
    row("their size", bytes(facts.page_bytes)),
    row("device", facts.device), row("kernels", facts.kernels === "cuda" ? "CUDA C++" : "Warp"));
  setShow("color");
  new ResizeObserver(() => { paint(); change(); }).observe(canvas);
  run();
}
start();

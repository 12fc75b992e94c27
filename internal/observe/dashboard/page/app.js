// The page of a run: it listens to its launcher and shows what has changed.

import { gantt, lanes, line } from './charts.js';

const $ = (id) => document.getElementById(id);
const html = (name, props = {}, ...children) => {
  const e = Object.assign(document.createElement(name), props);
  e.append(...children);
  return e;
};
const set = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

// ---- numbers in words

const amount = (x) => {
  for (const [size, unit] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    if (x >= size) return (unit === 'k' ? (x / 1e3).toFixed(1) : (x / size).toFixed(2)) + unit;
  }
  return x >= 100 || x === 0 ? x.toFixed(0) : x.toPrecision(3);
};
const millis = (x) => (x >= 10000 ? `${(x / 1000).toFixed(1)} s` : `${x.toFixed(x < 10 ? 2 : x < 100 ? 1 : 0)} ms`);
const plural = (n, noun) => `${n} ${noun}${n === 1 ? '' : 's'}`;
const duration = (s) => {
  s = Math.round(Math.max(0, s));
  const two = (n) => String(n).padStart(2, '0');
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
};
const clock = (t) => new Date(t).toLocaleTimeString([], { hour12: false });

// ---- what is known of the run

let run = null;
let points = [];
let workers = [];
let events = [];
let step = null; // the newest timeline
let held = false;
let over = false; // the run has ended

const ended = { done: 'finished', stopped: 'stopped', failed: 'failed' };

// ---- the token, which comes in the fragment and stays in this tab

const TOKEN = 'soliton-token';
if (location.hash.length > 1) {
  sessionStorage.setItem(TOKEN, decodeURIComponent(location.hash.slice(1)));
  history.replaceState(null, '', location.pathname);
}
const token = () => sessionStorage.getItem(TOKEN);

// ---- colours

const themes = ['system', 'light', 'dark'];
let theme = localStorage.getItem('soliton-theme') || 'system';
function paint() {
  document.documentElement.dataset.theme = theme;
  $('theme').setAttribute('aria-label', `Colours: ${theme === 'system' ? 'as the system has them' : theme}`);
  $('theme').title = $('theme').getAttribute('aria-label');
  $('theme').firstElementChild.textContent = { system: '◐', light: '☀', dark: '☾' }[theme];
}
$('theme').addEventListener('click', () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  localStorage.setItem('soliton-theme', theme);
  paint();
});
paint();

// ---- acting on the run

// A button that is busy stays enabled: it would lose the focus.
async function act(what, button) {
  if (button?.ariaBusy === 'true') return;
  if (button) button.ariaBusy = 'true';
  try {
    const r = await fetch('api/act', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', Authorization: `Bearer ${token()}` },
      body: JSON.stringify(what),
    });
    const answer = await r.json();
    if (r.status === 401) {
      sessionStorage.removeItem(TOKEN);
      showActs();
    }
    toast(answer.said || answer.error, !r.ok);
  } catch {
    toast('The launcher does not answer.', true);
  } finally {
    if (button) button.ariaBusy = null;
  }
}

const mayAct = () => Boolean(token()) && Boolean(run?.acts) && !over;

function showActs() {
  $('locked').hidden = Boolean(token()) || over;
  $('add').disabled = !mayAct();
  $('stop').disabled = !mayAct();
  for (const e of document.querySelectorAll('.does button, .does select')) e.disabled = !mayAct();
}

$('add').addEventListener('click', (e) => act({ do: 'add' }, e.currentTarget));
$('stop').addEventListener('click', () => {
  set('stop-about', run.state === 'stopping' ? 'It is about to end with the next commit. This ends it at once, without what the step under way has computed.'
    : 'It ends with the next commit: all files are written, and launcher resume can go on from there.');
  $('stopping').showModal();
});
$('stop-cancel').addEventListener('click', () => $('stopping').close());
$('stop-form').addEventListener('submit', () => act({ do: 'stop' }, $('stop')));
$('unlock').addEventListener('click', () => $('token').showModal());
$('token-cancel').addEventListener('click', () => $('token').close());
$('token-form').addEventListener('submit', () => {
  sessionStorage.setItem(TOKEN, $('token-in').value.trim());
  $('token-in').value = '';
  showActs();
  listen();
});

function toast(text, bad) {
  const t = html('p', { className: 'toast', textContent: text });
  t.dataset.kind = bad ? 'error' : 'said';
  $('toasts').append(t);
  setTimeout(() => t.remove(), bad ? 8000 : 4000);
}

// ---- the parts of the page

const lossChart = line($('loss-chart'), {
  label: 'Loss by step',
  value: (y) => String(+y.toPrecision(4)),
  describe: (p) => `step ${p.x}: loss ${p.y.toFixed(4)}${p.dot === undefined ? '' : `, held-out ${p.dot.toFixed(4)}`}`,
});
const speedChart = line($('speed-chart'), {
  label: 'Tokens a second by step',
  value: amount,
  describe: (p) => `step ${p.x}: ${amount(p.y)} tokens a second`,
  fromZero: true,
  smooth: true,
});
const pipeline = gantt($('gantt'));

function key(kind, text) {
  return [html('span', { className: `key ${kind}` }), text];
}

function showRun() {
  const r = run;
  const state = connected || over ? r.state : 'lost';
  $('state').dataset.state = state;
  set('state-text', state === 'lost' ? 'not connected' : ended[state] || state);
  set('program', r.program || 'Soliton');
  document.title = r.program ? `${r.steps ? `${Math.floor((100 * r.step) / r.steps)} % · ` : ''}${r.program} · Soliton` : 'Soliton';
  set('model', r.program ? [r.model !== r.program && r.model, `${amount(r.parameters)} parameters`, `${r.reduction} reduction`].filter(Boolean).join(' · ') : '');
  set('step', r.steps ? `Step ${r.step}` : r.note || 'Starting');
  set('steps', r.steps ? `of ${r.steps}` : '');
  set('left', r.state in ended ? (r.seconds ? `took ${duration(r.seconds)}` : '') : r.left >= 0 ? `about ${duration(r.left)} left` : '');
  const percent = r.steps ? (100 * r.step) / r.steps : 0;
  $('fill').style.width = `${percent}%`;
  $('track').setAttribute('aria-valuenow', Math.round(percent));
  set('note', r.steps ? r.note || (over ? '' : r.reason) : '');
  set('loss', r.loss === null ? '–' : r.loss.toFixed(4));
  set('val', r.val_loss === null ? '' : `held-out ${r.val_loss.toFixed(4)}`);
  set('speed', r.loss === null ? '–' : amount(r.speed));
  set('ms', r.loss === null ? '' : `${millis(r.ms)} a step`);
  const there = workers.filter((w) => !w.gone);
  set('count', workers.length ? String(there.length) : '–');
  set('stages', r.stages.length ? `in ${plural(r.stages.length, 'stage')}, plan ${r.plan}` : '');
  const recoveries = events.filter((e) => e.recovery);
  set('recovered', r.steps ? String(r.recovered) : '–');
  set('recovery', recoveries.length ? `the last in ${millis(recoveries[recoveries.length - 1].recovery.total_ms)}` : '');
  set('about', r.program ? [`${r.global_batch} samples a step in micro-batches of ${r.micro_batch}`, `${plural(r.threads, 'thread')} a worker`, `${r.kernel} kernels`, r.run_dir].filter(Boolean).join(' · ') : '');
  set('params', r.params ? `params_sha256 ${r.params}` : '');

  const banner = $('banner');
  if (over) {
    banner.hidden = false;
    banner.dataset.kind = r.state;
    set('banner', { done: `All ${r.steps} steps are done. The launcher has ended; this page keeps what it was told last.`, stopped: `The run has ended after step ${r.step}: ${r.note}.`, failed: `The run has failed: ${r.note}` }[r.state]);
  } else if (!connected) {
    banner.hidden = false;
    banner.dataset.kind = 'lost';
    set('banner', token() ? 'The launcher does not answer. What you see is as of the last connection; this page keeps trying.'
      : 'The launcher wants another token. What you see is as of the last connection.');
  } else {
    banner.hidden = true;
  }
}

function showCurves() {
  const marks = events.filter((e) => e.recovery).map((e) => ({ x: e.recovery.step, title: `step ${e.recovery.step}: ${e.reason}` }));
  lossChart.draw(points.map((p) => ({ x: p.step, y: p.loss, dot: p.val })), marks);
  speedChart.draw(points.map((p) => ({ x: p.step, y: p.speed })), marks);
  const legend = key('line', 'training');
  if (points.some((p) => p.val !== undefined)) legend.push(...key('val', 'held-out'));
  if (marks.length) legend.push(...key('mark', 'recovery'));
  $('loss-legend').replaceChildren(...legend);
}

// rows fills a table that is open.
function rows(table, lines) {
  const body = $(table).tBodies[0];
  if (!$(table).closest('details').open) return;
  body.replaceChildren(...lines.map((cells) => html('tr', {}, ...cells.map((c) => html('td', { textContent: c })))));
}

function showCurveTables() {
  const last = points.slice(-100).reverse();
  rows('loss-table', last.map((p) => [p.step, p.loss.toFixed(4), p.val === undefined ? '' : p.val.toFixed(4)]));
  rows('speed-table', last.map((p) => [p.step, amount(p.speed), millis(p.ms)]));
}

// card is the place of a worker, which stays the same element as long as the worker is there.
const cards = new Map();
function card(id) {
  if (cards.has(id)) return cards.get(id);
  const c = {
    title: html('b', { textContent: `Worker ${id}` }),
    rank: html('span', { className: 'faint' }),
    doing: html('span', { className: 'doing' }),
    fill: html('div'),
    pace: html('span'),
  };
  const button = (name, text, title) => {
    const b = html('button', { type: 'button', className: name, textContent: text, title });
    b.setAttribute('aria-label', `${text} worker ${id}`);
    b.addEventListener('click', () => act({ do: name, worker: id }, b));
    return b;
  };
  const slow = html('select', { title: 'How fast it may compute' },
    html('option', { value: '', textContent: 'Slow' }), html('option', { value: '0.5', textContent: 'to 50 %' }),
    html('option', { value: '0.25', textContent: 'to 25 %' }), html('option', { value: '0.1', textContent: 'to 10 %' }),
    html('option', { value: '1', textContent: 'full speed' }));
  slow.setAttribute('aria-label', `Slow worker ${id}`);
  slow.addEventListener('change', () => {
    const factor = Number(slow.value);
    slow.value = '';
    if (factor) act({ do: 'slow', worker: id, factor });
  });
  const does = html('div', { className: 'does' },
    button('kill', 'Kill', 'End it at once (SIGKILL)'), button('freeze', 'Freeze', 'Stop it (SIGSTOP)'),
    button('thaw', 'Thaw', 'Let it go on (SIGCONT)'), button('leave', 'Leave', 'Ask it to hand over and end (SIGTERM)'), slow);
  does.setAttribute('role', 'group');
  does.setAttribute('aria-label', `Worker ${id}`);
  c.box = html('article', { className: 'worker' },
    html('div', { className: 'who' }, c.title, c.rank, c.doing),
    html('div', { className: 'pace' }, html('div', { className: 'meter' }, c.fill), c.pace), does);
  c.box.dataset.worker = id;
  cards.set(id, c);
  return c;
}

// also stands for a worker in its second stage and all further ones.
function also(w, stage, rank) {
  const c = card(w.id);
  c.also ||= [];
  c.also[stage] ||= html('div', { className: 'worker also' });
  c.also[stage].textContent = `Worker ${w.id} · rank ${rank} · see stage ${w.stages[0]}`;
  return c.also[stage];
}

function doing(w) {
  if (run.state in ended) return ['ended', 'rest'];
  if (w.state) return [w.state, 'wait'];
  if (run.state === 'recovering') return ['recovering', 'wait'];
  if (!w.stages.length) return ['waiting for its part', 'wait'];
  return [w.busy >= 0 ? `computes ${Math.round(100 * w.busy)} %` : 'training', ''];
}

// A click counts for the element on which the pointer went down, unless that moves before it goes up. So nothing
// moves meanwhile.
let pressed = false;
$('grid').addEventListener('pointerdown', () => { pressed = true; });
for (const up of ['pointerup', 'pointercancel', 'blur']) {
  window.addEventListener(up, () => {
    if (pressed) setTimeout(() => { pressed = false; showWorkers(); }); // the click comes first
  });
}

// place makes the elements of a box these, in this order. Those that are there already stay where they are.
function place(box, list) {
  const wanted = new Set(list);
  let at = box.firstElementChild;
  for (const e of list) {
    while (at && !wanted.has(at)) at = at.nextElementSibling; // it has another place, or none
    if (at === e) at = at.nextElementSibling;
    else box.insertBefore(e, at);
  }
}

function showWorkers() {
  if (pressed) return;
  const there = new Map(workers.filter((w) => !w.gone).map((w) => [w.id, w]));
  const fastest = Math.min(...workers.filter((w) => !w.gone && w.pass_ms > 0).map((w) => w.pass_ms));
  const placed = new Set();
  const sections = [];
  const fill = (w, where, rank) => {
    const c = card(w.id);
    placed.add(w.id);
    const [text, kind] = doing(w);
    c.doing.textContent = text;
    c.doing.dataset.kind = kind;
    c.rank.textContent = [rank >= 0 ? `rank ${rank}` : '', w.incarnation ? `life ${w.incarnation + 1}` : ''].filter(Boolean).join(' · ');
    c.fill.style.width = w.pass_ms > 0 ? `${(100 * fastest) / w.pass_ms}%` : '0';
    c.pace.textContent = w.pass_ms > 0 ? `${millis(w.pass_ms)} a micro-batch` : w.step ? `step ${w.step}` : '';
    c.box.setAttribute('aria-label', `Worker ${w.id}, ${text}`);
    where.push(c.box);
  };
  run.stages.forEach((st, i) => {
    const list = [];
    st.workers.forEach((id, rank) => {
      const w = there.get(id);
      if (!w) return;
      if (placed.has(id)) list.push(also(w, i, rank));
      else fill(w, list, rank);
    });
    sections.push([`Stage ${i}`, st.hi - st.lo === 1 ? `layer ${st.lo}` : `layers ${st.lo} to ${st.hi - 1}`, list]);
  });
  const rest = [...there.values()].filter((w) => !placed.has(w.id));
  if (rest.length) {
    const list = [];
    rest.forEach((w) => fill(w, list, -1));
    sections.push([run.stages.length ? 'Joining' : 'Starting', '', list]);
  }
  // Elements stay where they are if they can.
  const grid = $('grid');
  const focused = document.activeElement;
  const all = new Set(sections.flatMap((s) => s[2]));
  for (const e of grid.querySelectorAll('.worker')) if (!all.has(e)) e.remove();
  sections.forEach(([name, about, list], i) => {
    let s = grid.children[i];
    if (!s) {
      s = html('div', { className: 'stage' }, html('div', { className: 'stage-name' }, html('h3'), html('span', { className: 'faint' })), html('div', { className: 'ranks' }));
      grid.append(s);
    }
    const [h, a] = s.firstElementChild.children;
    if (h.textContent !== name) h.textContent = name;
    if (a.textContent !== about) a.textContent = about;
    place(s.lastElementChild, list);
  });
  while (grid.children.length > sections.length) grid.lastElementChild.remove();
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  for (const id of cards.keys()) if (!there.has(id)) cards.delete(id);

  $('no-workers').hidden = sections.length > 0;
  const gone = workers.filter((w) => w.gone);
  $('gone').hidden = gone.length === 0;
  const list = gone.map((w) => (w.gone.includes(`worker ${w.id}`) ? w.gone : `worker ${w.id}: ${w.gone}`));
  if ($('gone-list').dataset.list !== list.join('\n')) {
    $('gone-list').dataset.list = list.join('\n');
    $('gone-list').replaceChildren(...list.map((t) => html('li', { textContent: t })));
  }
  showActs();
}

function showStep() {
  if (!step || held) return;
  $('no-pipeline').hidden = true;
  pipeline.draw(step);
  const end = Math.max(1, ...step.workers.map((w) => w.end));
  // Of passes that run side by side, each takes a share of the worker.
  const sum = (w, b) => w.spans.filter((s) => s.b === b).reduce((t, s) => t + s.t - s.f, 0) / lanes(w);
  let busy = 0;
  const lines = step.workers.map((w) => {
    const [f, b] = [sum(w, false), sum(w, true)];
    busy += f + b;
    return [`Worker ${w.id}`, w.spans.filter((s) => !s.b).length, w.spans.filter((s) => s.b).length, millis(f / 1000), millis(b / 1000), millis(Math.max(0, w.end - w.from - f - b) / 1000), millis((w.end - w.from) / 1000)];
  });
  const idle = Math.round(100 * Math.max(0, 1 - busy / (end * step.workers.length)));
  set('pipeline-about', `Step ${step.step} took ${millis(end / 1000)}; ${idle} % of the workers' time was not spent in passes.${step.workers.some((w) => w.cut) ? ' Some passes are left out.' : ''}`);
  rows('gantt-table', lines);
}
$('hold').addEventListener('click', () => {
  held = !held;
  $('hold').setAttribute('aria-pressed', held);
  $('hold').textContent = held ? 'Held' : 'Hold';
  showStep();
});

const tones = {
  lost: 'bad', failed: 'bad', refused: 'bad', evict: 'bad', rollback: 'bad', chaos: 'warn', hold: 'warn', unprotected: 'warn', repaired: 'warn', stop: 'warn',
  recovered: 'good', joined: 'good', protected: 'good', start: 'info', resume: 'info', plan: 'info', end: 'info', begin: 'info', left: 'info', checkpoint: '',
};
const shown = 200; // events in the list
const told = new Set(['lost', 'recovered', 'joined', 'left', 'failed', 'end', 'rollback', 'hold']);

function showEvents(fresh) {
  const list = $('events');
  for (const e of fresh) {
    const badge = html('span', { className: 'badge', textContent: e.kind });
    badge.dataset.tone = tones[e.kind] || '';
    list.prepend(html('li', {}, html('time', { dateTime: e.time, textContent: clock(e.time) }), badge, html('p', { textContent: e.reason })));
  }
  while (list.children.length > shown) list.lastElementChild.remove();
  $('no-events').hidden = events.length > 0;
  const news = fresh.filter((e) => told.has(e.kind)).map((e) => e.reason);
  if (news.length && news.length < 10) $('announce').textContent = news.join('. ');
  if (fresh.some((e) => e.recovery)) showRecoveries();
}

const phases = ['detect', 'query', 'plan', 'agree', 'edit', 'resume'];

function showRecoveries() {
  const all = events.filter((e) => e.recovery).map((e) => e.recovery).reverse();
  $('no-recoveries').hidden = all.length > 0;
  $('recoveries-more').hidden = all.length === 0;
  $('phases').replaceChildren(...(all.length ? phases.flatMap((p, i) => key(`p${i}`, p)) : []));
  const longest = Math.max(...all.map((r) => r.total_ms), 0.001);
  $('recoveries').replaceChildren(...all.slice(0, 20).map((r) => {
    const bar = html('div', { className: 'phase-bar' });
    bar.setAttribute('aria-hidden', 'true');
    phases.forEach((p, i) => {
      const part = html('i', { className: `p${i}`, title: `${p} ${millis(r[`${p}_ms`])}` });
      part.style.width = `${(100 * r[`${p}_ms`]) / longest}%`;
      bar.append(part);
    });
    const worst = phases.reduce((a, b) => (r[`${a}_ms`] >= r[`${b}_ms`] ? a : b));
    return html('li', {}, html('div', { className: 'line' }, html('span', { textContent: r.cause }), html('b', { textContent: millis(r.total_ms) })), bar,
      html('small', { textContent: `step ${r.step} · longest: ${worst}, ${millis(r[`${worst}_ms`])} · ${plural(r.recomputed_microbatches, 'micro-batch').replace('batchs', 'batches')} again` }));
  }));
  rows('recoveries-table', all.map((r) => [r.step, r.cause, ...phases.map((p) => millis(r[`${p}_ms`])), millis(r.total_ms)]));
}

for (const d of document.querySelectorAll('details')) {
  d.addEventListener('toggle', () => { showCurveTables(); showStep(); showRecoveries(); });
}

// ---- listening

let connected = false;
let started = false;

function take(f) {
  const fresh = f.events || [];
  if (f.run) run = f.run;
  if (f.reset) points = f.points || [];
  else if (f.points) points.push(...f.points);
  if (f.workers) workers = f.workers;
  events.push(...fresh);
  if (events.length > 1000) events = events.slice(-500);
  over = run.state in ended;
  if (fresh.length) showEvents(fresh);
  if (f.points || f.reset || fresh.some((e) => e.recovery)) {
    showCurves();
    showCurveTables();
  }
  if (f.workers || f.run) showWorkers();
  if (f.timeline) {
    step = f.timeline;
    // In the order of the stages, in which the micro-batches pass them.
    for (const w of step.workers) w.stage = workers.find((x) => x.id === w.id)?.stages[0];
    step.workers.sort((a, b) => (a.stage ?? 1e9) - (b.stage ?? 1e9) || a.id - b.id);
    showStep();
  }
  showRun();
}

// heard takes in one frame of the stream, as its text.
function heard(text) {
  if (!started) { // the first frame of a connection has everything
    started = true;
    points = [];
    events = [];
    $('events').replaceChildren();
  }
  take(JSON.parse(text));
}

// listen reads the stream of frames to its end. It needs the token, which an EventSource could not send.
let listening = false;
async function listen() {
  if (listening || over || !token()) return;
  listening = true;
  try {
    const r = await fetch('api/events', { headers: { Authorization: `Bearer ${token()}` } });
    if (r.status === 401) sessionStorage.removeItem(TOKEN);
    if (r.ok) {
      connected = true;
      started = false;
      const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ''; ;) {
        const { done, value } = await reader.read();
        if (done) break;
        const frames = (rest + value).split('\n\n');
        rest = frames.pop();
        for (const f of frames) if (f.startsWith('data: ')) heard(f.slice(6));
      }
    }
  } catch { /* the launcher does not answer */ }
  listening = false;
  connected = false;
  showConnection();
  if (!over && token()) setTimeout(listen, 3000);
}

function showConnection() {
  showActs();
  if (run) {
    showRun();
    return;
  }
  $('state').dataset.state = connected ? 'starting' : 'lost';
  set('state-text', token() ? 'not connected' : 'token needed');
}

if (!token()) showConnection();
listen();

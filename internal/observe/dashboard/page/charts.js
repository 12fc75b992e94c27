// The charts of the page, in SVG. Each is redrawn from its data; colours come from the style sheet.

const NS = 'http://www.w3.org/2000/svg';

function el(name, attributes, ...children) {
  const e = document.createElementNS(NS, name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

// ticks returns round numbers, about n, from low to high.
export function ticks(low, high, n) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / n;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((f) => f * power >= raw) ?? 10);
  const out = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step / 1e6; x += step) out.push(Math.abs(x) < step / 1e6 ? 0 : x);
  return out;
}

// means returns for each value the mean of those up to by places around it.
function means(values, by) {
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - by), i + by + 1);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

// line makes a curve in a box: draw(points, marks) shows [{x, y, dot}] and lines at the x of marks. value and
// describe put numbers into words.
export function line(box, { label, value, describe, fromZero, smooth }) {
  const svg = el('svg', { role: 'img', tabindex: '0', 'aria-label': label });
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  const empty = document.createElement('p');
  empty.className = 'empty';
  empty.textContent = 'The first step is under way.';
  const spoken = document.createElement('p');
  spoken.className = 'hide';
  spoken.setAttribute('aria-live', 'polite');
  box.append(svg, empty, tip, spoken);

  let points = [];
  let marks = [];
  let at = -1; // the point under the cursor
  let xOf = () => 0;
  let yOf = () => 0;
  let cursor = null;

  function draw() {
    const width = box.clientWidth;
    const height = box.clientHeight;
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.setAttribute('height', height);
    svg.replaceChildren();
    empty.hidden = points.length > 0;
    if (!points.length || width < 50) return;
    let low = Infinity;
    let high = -Infinity;
    for (const p of points) {
      low = Math.min(low, p.y, p.dot ?? p.y);
      high = Math.max(high, p.y, p.dot ?? p.y);
    }
    if (fromZero) low = 0;
    if (high - low < 1e-9) { high += 0.5 * Math.abs(high) || 1; low -= fromZero ? 0 : 0.5 * Math.abs(low) || 1; }
    const pad = (high - low) * 0.06;
    if (!fromZero) low -= pad;
    high += pad;
    const top = 8;
    const bottom = height - 22;
    const marksY = ticks(low, high, Math.max(3, Math.round(height / 45)));
    const left = 10 + 6.4 * Math.max(...marksY.map((y) => value(y).length));
    const right = width - 8;
    const x0 = points[0].x;
    const x1 = Math.max(points[points.length - 1].x, x0 + 1);
    xOf = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
    yOf = (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
    for (const y of marksY) {
      svg.append(el('line', { class: 'grid', x1: left, x2: right, y1: yOf(y), y2: yOf(y) }));
      svg.append(el('text', { x: left - 7, y: yOf(y) + 4, 'text-anchor': 'end' }, value(y)));
    }
    for (const x of ticks(x0, x1, Math.max(3, Math.round(width / 100))).filter(Number.isInteger)) {
      svg.append(el('text', { x: xOf(x), y: height - 4, 'text-anchor': xOf(x) > right - 14 ? 'end' : 'middle' }, String(x)));
    }
    for (const m of marks) {
      if (m.x >= x0 && m.x <= x1) {
        svg.append(el('line', { class: 'mark', x1: xOf(m.x), x2: xOf(m.x), y1: top, y2: bottom }, el('title', {}, m.title)));
      }
    }
    const through = (ys) => points.map((p, i) => `${i ? 'L' : 'M'}${xOf(p.x).toFixed(1)} ${yOf(ys[i]).toFixed(1)}`).join('');
    const raw = points.map((p) => p.y);
    const path = through(smooth ? means(raw, Math.max(1, Math.round(raw.length / 40))) : raw);
    if (smooth) svg.append(el('path', { class: 'raw', d: through(raw) }));
    svg.append(el('path', { class: 'area', d: `${path}L${xOf(points[points.length - 1].x).toFixed(1)} ${bottom}L${left} ${bottom}Z` }));
    svg.append(el('path', { class: 'curve', d: path }));
    for (const p of points) {
      if (p.dot !== undefined) svg.append(el('circle', { class: 'val', cx: xOf(p.x), cy: yOf(p.dot), r: 4 }));
    }
    cursor = el('g', {}, el('line', { class: 'cursor', y1: top, y2: bottom }), el('circle', { class: 'at', r: 4.5 }));
    svg.append(cursor);
    point(Math.min(at, points.length - 1));
    svg.setAttribute('aria-label', `${label}: ${describe(points[0])} to ${describe(points[points.length - 1])}. Arrow keys read single points.`);
  }

  function point(i) {
    at = i;
    const on = i >= 0 && i < points.length;
    tip.hidden = !on;
    if (cursor) cursor.style.display = on ? '' : 'none';
    if (!on) return;
    const p = points[i];
    const x = xOf(p.x);
    cursor.firstChild.setAttribute('x1', x);
    cursor.firstChild.setAttribute('x2', x);
    cursor.lastChild.setAttribute('cx', x);
    cursor.lastChild.setAttribute('cy', yOf(p.y));
    tip.textContent = describe(p);
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(x, half), box.clientWidth - half)}px`;
  }

  svg.addEventListener('pointermove', (e) => {
    if (!points.length) return;
    const x = e.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    points.forEach((p, i) => { if (Math.abs(xOf(p.x) - x) < Math.abs(xOf(points[best].x) - x)) best = i; });
    point(best);
  });
  svg.addEventListener('pointerleave', () => point(-1));
  svg.addEventListener('blur', () => point(-1));
  svg.addEventListener('keydown', (e) => {
    const last = points.length - 1;
    const by = Math.max(1, Math.round(points.length / 20)) * (e.shiftKey ? 1 : 0) || 1;
    const to = { ArrowLeft: (at < 0 ? last + 1 : at) - by, ArrowRight: at + by, Home: 0, End: last }[e.key];
    if (e.key === 'Escape') point(-1);
    if (to === undefined || last < 0) return;
    e.preventDefault();
    point(Math.min(Math.max(to, 0), last));
    spoken.textContent = describe(points[at]);
  });
  new ResizeObserver(draw).observe(box);

  return {
    draw(newPoints, newMarks) {
      points = newPoints;
      marks = newMarks;
      draw();
    },
  };
}

// numbered is how many passes of a step are drawn with titles and numbers; more become one shape for each kind.
const numbered = 1500;

// lanes is how many passes a worker of a step ran side by side.
export function lanes(w) {
  return w.spans.reduce((n, s) => Math.max(n, (s.l || 0) + 1), 1);
}

// gantt draws what each worker did in a step.
export function gantt(box) {
  let step = null;
  function draw() {
    const width = box.clientWidth;
    if (!step || width < 50) return;
    const end = Math.max(1, ...step.workers.map((w) => w.end));
    const row = 26;
    const bar = 20;
    const left = width < 500 ? 34 : 118;
    const right = width - 6;
    const height = step.workers.length * row + 24;
    const x = (t) => left + (Math.min(Math.max(t, 0), end) / end) * (right - left);
    const svg = el('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': `What each of ${step.workers.length} workers did in step ${step.step}; the table below has the numbers.` });
    const many = step.workers.reduce((n, w) => n + w.spans.length, 0) > numbered;
    step.workers.forEach((w, i) => {
      const y = i * row + 2;
      svg.append(el('text', { class: 'label', x: 0, y: y + 14 }, width < 500 ? `W${w.id}` : `Worker ${w.id}`,
        ...(width < 500 || w.stage === undefined ? [] : [el('tspan', { dx: 6 }, `stage ${w.stage}`)])));
      svg.append(el('rect', { class: 'idle', x: x(w.from), y, width: Math.max(1, x(w.end) - x(w.from)), height: bar, rx: 4 }));
      if (w.commit > 0) {
        svg.append(el('rect', { class: 'c', x: x(w.commit), y: y + bar - 5, width: Math.max(1, x(w.end) - x(w.commit)), height: 5, rx: 2 },
          el('title', {}, `commit, from ${ms(w.commit)} to ${ms(w.end)}`)));
      }
      const shapes = { f: '', b: '' };
      const thin = bar / lanes(w);
      for (const s of w.spans) {
        const top = y + (s.l || 0) * thin;
        const kind = s.b ? 'b' : 'f';
        const from = x(s.f);
        const wide = Math.max(1, x(s.t) - from - 1);
        if (many) {
          shapes[kind] += `M${from.toFixed(1)} ${top.toFixed(1)}h${wide.toFixed(1)}v${thin.toFixed(1)}h-${wide.toFixed(1)}z`;
          continue;
        }
        svg.append(el('rect', { class: kind, x: from, y: top, width: wide, height: thin, rx: Math.min(3, wide / 2, thin / 2) },
          el('title', {}, `${s.b ? 'backward' : 'forward'} of micro-batch ${s.m}${s.s >= 0 ? `, stage ${s.s}` : ''}: ${ms(s.t - s.f)}, from ${ms(s.f)}`)));
        if (thin === bar && wide > 6.5 * String(s.m).length + 3) {
          svg.append(el('text', { class: 'num', x: from + wide / 2, y: y + 14, 'text-anchor': 'middle' }, String(s.m)));
        }
      }
      if (many) for (const kind of ['f', 'b']) svg.append(el('path', { class: kind, d: shapes[kind] }));
    });
    for (const t of ticks(0, end / 1000, Math.max(2, Math.round(width / 130)))) {
      const at = x(t * 1000);
      svg.append(el('line', { class: 'grid', x1: at, x2: at, y1: height - 22, y2: height - 17 }));
      svg.append(el('text', { x: at, y: height - 4, 'text-anchor': at > right - 30 ? 'end' : at < left + 5 ? 'start' : 'middle' }, `${+t.toPrecision(4)} ms`));
    }
    box.replaceChildren(svg);
  }
  new ResizeObserver(draw).observe(box);
  return {
    draw(s) {
      step = s;
      draw();
    },
  };
}

function ms(us) {
  return `${(us / 1000).toFixed(us < 10000 ? 2 : 1)} ms`;
}

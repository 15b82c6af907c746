// The walk through a step, on a page without a kernel. `root` is the fragment, `d` the step: per event the owner and
// the bytes it added or freed; per owner what was there before. The value of the slider is the only state.
((root, d) => {
  const $ = (name) => root.querySelector(`[data-is="${name}"]`), g = d.geometry, MIB = 2 ** 20;
  const number = (value, digits = 1) => value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const stacks = [], totals = [];
  let now = d.before.slice();
  d.owner.forEach((owner, i) => {
    if (owner >= 0) { now = now.slice(); now[owner] += d.bytes[i]; now[d.slack] += d.over[i]; }
    stacks.push(now);
    totals.push(now.reduce((sum, size) => sum + size, 0));
  });
  const count = totals.length, most = Math.max(...totals), highest = Math.max(...d.readings.map((i) => totals[i]));
  const k = (g.bottom - g.top) / (1.04 * most), across = (i) => g.left + (g.right - g.left) * (i + 0.5) / count;
  const every = totals.map((_, i) => i), few = [...new Set([...d.readings, ...Object.values(d.moments)])].sort((a, b) => a - b);
  const slider = $("slider"), rects = d.colours.map((colour) => {
    const rect = document.createElementNS($("picture").namespaceURI, "rect");
    for (const [key, value] of Object.entries({x: g.bar_left, width: g.bar_width, fill: colour})) rect.setAttribute(key, value);
    $("bar").append(rect);
    return rect;
  });
  let stops = few, timer = 0;

  function lens(i) {
    const low = Math.max(0, i - g.reach), high = Math.min(count, i + g.reach + 1), y = totals.slice(low, high);
    const least = Math.min(...y), top = Math.max(...y), scale = (g.lens - 12) / Math.max(top - least, 1);
    const wide = (g.right - g.left) / (2 * g.reach + 1), x0 = g.left + (low - i + g.reach) * wide;
    const level = (value) => g.lens - 4 - scale * (value - least), at = g.left + g.reach * wide;
    let path = `M${x0} ${level(y[0])}`;
    y.forEach((value, n) => { path += `H${(x0 + n * wide).toFixed(1)}V${level(value).toFixed(1)}`; });
    const before = level(i ? totals[i - 1] : y[0]), here = level(totals[i]);
    $("lens").innerHTML = `<path d="${path}H${x0 + y.length * wide}" fill="none" stroke="currentColor" stroke-opacity=".55"/>`
      + `<rect x="${at - 1.5}" y="${Math.min(before, here)}" width="4" height="${Math.max(Math.abs(here - before), 1.5)}" `
      + `fill="${d.owner[i] < 0 ? "#888" : d.colours[d.owner[i]]}" stroke="currentColor" stroke-width=".5"/>`
      + `<text x="${g.left - 5}" y="${g.lens - 2}" class="tick">${number(least / MIB, 0)}</text>`
      + `<text x="${g.left - 5}" y="13" class="tick">${number(top / MIB, 0)}</text>`
      + `<text x="${g.right + 6}" y="${g.lens - 2}">±${g.reach} events</text>`;
  }

  function words(i) {
    const [what, who] = [d.said[d.action[i]], d.who[d.by[i]]], size = d.size[i] / MIB;
    const seen = d.readings.map((at, n) => (at === i ? n : -1)).filter((n) => n >= 0);
    const reading = seen.length ? ` · reading ${[...new Set([seen[0], seen.at(-1)])].map((n) => n + 1).join("–")} of `
      + `${d.readings.length}: ${seen.map((n) => d.names[n]).join(", ")}` : "";
    const unseen = d.blind[0] <= i && i < d.blind[1] && totals[i] > highest;
    $("total").textContent = `${number(totals[i] / MIB)} MiB allocated`;
    $("where").textContent = `event ${number(i + 1, 0)} of ${number(count, 0)} · ${d.phases[d.phase[i]] || "between"}${reading}`;
    $("what").textContent = `${what} ${number(size, size < 1 ? 3 : 1)} MiB`;
    $("who").textContent = who;
    $("verdict").textContent = i === d.moments.peak ? (most > highest ? `the peak: ${number((most - highest) / MIB, 0)} MiB above `
      + "every reading" : "the peak") : unseen ? "blind spot: no reading sees this" : "\u00a0";
  }

  function draw() {
    const i = stops[slider.value], x = across(i);
    let y = g.bottom;
    stacks[i].forEach((size, j) => {
      y -= k * size;
      rects[j].setAttribute("y", y);
      rects[j].setAttribute("height", k * size);
      $("owners").rows[d.colours.length - 1 - j].cells[1].textContent = number(size / MIB);
    });
    $("cursor").setAttribute("d", `M${x} ${g.top - 4}V${g.bottom}M${x} ${y}H${g.bar_left}`);
    $("dot").setAttribute("cx", x);
    $("dot").setAttribute("cy", y);
    lens(i);
    words(i);
    slider.setAttribute("aria-valuetext", `${$("total").textContent}, ${$("where").textContent}`);
  }

  function show(i) {
    const at = stops.findIndex((stop) => stop >= i);
    slider.value = at < 0 ? stops.length - 1 : at;
    draw();
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => {
      if (+slider.value >= stops.length - 1) return play(false);
      slider.value = +slider.value + 1;
      draw();
    }, stops === every ? 30 : 150) : 0;
    $("play").textContent = on ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", on ? "pause" : "play");
  }

  slider.addEventListener("input", draw);
  $("play").addEventListener("click", () => {
    if (!timer && +slider.value >= stops.length - 1) slider.value = 0;
    play(!timer);
  });
  $("level").addEventListener("change", () => {
    const here = stops[slider.value];
    stops = $("level").checked ? every : few;
    slider.max = stops.length - 1;
    if (timer) play(true);
    show(here);
  });
  root.querySelectorAll("[data-to]").forEach((button) => button.addEventListener("click", () => { play(false); show(+button.dataset.to); }));
  root.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1, PageDown: -20, PageUp: 20}[event.key];
    if (event.key === " " && event.target.tagName !== "BUTTON" && event.target !== $("level")) { $("play").click(); event.preventDefault(); }
    if (!by || event.target === slider) return;
    slider.value = +slider.value + by;
    draw();
    event.preventDefault();
  });
  slider.max = stops.length - 1;
  show(d.moments.peak);
  root.classList.add("alive");
})

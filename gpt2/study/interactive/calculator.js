// The calculator on a page without a kernel. `d` holds the formulas as text, per choice of knobs and moment, and the
// exact answers that were predicted when the page was made. The formulas are ours; nothing a reader types is evaluated.
((root, d) => {
  const $ = (name) => root.querySelector(`[data-is="${name}"]`), MIB = 2 ** 20;
  const number = (value, digits = 1) => value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const letters = ["L", "D", "H", "V", "C", "P", "B", "T", "K", "W"];
  const compile = (text) => new Function(...letters, `return Math.floor(${text.replaceAll("·", "*").replaceAll("²", "**2")})`);
  const formulas = d.formulas.map(compile), parameters = compile(d.parameters);
  const knobs = Object.keys(d.knobs), shape = ["layers", "width", "heads", "vocabulary", "context"];

  function setting() {
    const values = Object.fromEntries([...shape, "batch", "length"].map((name) => [name, Math.max(1, Math.round(+$(name).value) || 1)]));
    knobs.forEach((name) => { values[name] = $(name).value; });
    return {...values, gpu: $("gpu").value};
  }

  function peak(s, batch) {
    const {workspace} = d.gpus[s.gpu];
    const values = {L: s.layers, D: s.width, H: s.heads, V: s.vocabulary, C: s.context, P: 0, B: batch, T: s.length, K: d.chunks, W: workspace};
    values.P = parameters(...letters.map((letter) => values[letter]));
    const given = letters.map((letter) => values[letter]);
    let best = {total: -1};
    for (const [moment, terms] of Object.entries(d.moments[knobs.map((name) => s[name]).join()])) {
      const owners = d.colours.map(() => 0);
      for (const [owner, bytes, formula] of terms) owners[owner] += bytes * formulas[formula](...given);
      const total = owners.reduce((sum, size) => sum + size, 0);
      if (total > best.total) best = {moment, owners, total};
    }
    return {...best, reserved: Math.round(best.total * d.ratio)};
  }

  function largest(s) {
    const fits = (batch) => peak(s, batch).reserved <= d.gpus[s.gpu].capacity;
    let low = 0, high = 1;
    while (high < 65536 && fits(high)) { low = high; high *= 2; }
    while (high - low > 1) { const middle = Math.floor((low + high) / 2); if (fits(middle)) low = middle; else high = middle; }
    return low;
  }

  const firsts = d.exact.filter((row, n) => d.exact.findIndex((other) => [...shape, "length", ...knobs, "gpu"].every((name) =>
    other[name] === row[name])) === n);
  const same = (s) => d.exact.filter((row) => [...shape, "length", ...knobs, "gpu"].every((name) => row[name] === s[name]));

  function cells(name, formula, row, value) {
    const difference = row && row.fits ? `${formula < value ? "−" : "+"}${number(Math.abs(formula - value) / MIB)}` : "";
    const exact = row ? number(value / MIB) + (row.fits ? "" : " so far") : "·";
    return `<tr><td>${name}</td><td>${number(formula / MIB)}</td><td>${exact}</td><td>${difference}</td></tr>`;
  }

  function draw() {
    const s = setting(), bad = s.width % s.heads ? `width ${s.width} is not divisible by ${s.heads} heads` : s.length > s.context
      ? `length ${s.length} is above the context, ${s.context}` : "";
    $("batch-is").textContent = s.batch;
    $("length-is").textContent = number(s.length, 0);
    $("screen").hidden = Boolean(bad);
    $("note").textContent = bad;
    if (bad) return;
    const found = peak(s, s.batch), capacity = d.gpus[s.gpu].capacity, family = same(s);
    const row = family.find((candidate) => candidate.batch === s.batch);
    const pool = row && row.fits ? row.peak_reserved_bytes : found.reserved, k = d.room / Math.max(capacity, pool, found.total) / 1.03;
    let x = 0;
    const parts = found.owners.map((size, j) => {
      const rect = `<rect x="${x}" y="11" width="${k * size}" height="40" fill="${d.colours[j]}"/>`;
      x += k * size;
      return rect;
    }).join("");
    const tick = row && row.fits ? `<path d="M${k * row.peak_allocated_bytes} 6v50" stroke="currentColor" stroke-width="2"/>` : "";
    $("bar").innerHTML = `<rect x="0" y="11" width="${k * pool}" height="40" fill="${d.cached}" stroke="${d.edge}"/>${parts}${tick}`
      + `<path d="M${k * capacity} 1v60" stroke="${d.alarm}" stroke-width="3"/>`;
    $("card").textContent = `free on the card: ${number(capacity / MIB, 0)} MiB`;
    const fits = row ? row.fits : found.reserved <= capacity, works = family.filter((r) => r.fits).map((r) => r.batch);
    const fails = family.filter((r) => !r.fits).map((r) => r.batch);
    $("verdict").textContent = fits ? "fits" : "does not fit";
    $("verdict").className = fits ? "good" : "bad";
    $("largest").textContent = `largest batch by formula: ${number(largest(s), 0)}` + (works.length && fails.length
      ? `; predicted exactly: ${Math.max(...works)} fits, ${Math.min(...fails)} does not` : "");
    $("numbers").innerHTML = cells("allocated", found.total, row, row && row.peak_allocated_bytes)
      + cells("reserved", found.reserved, row, row && row.peak_reserved_bytes);
    $("who").textContent = !row ? `peak by formula: ${found.moment}` : row.failure ? `fails: ${row.failure}` : `peak set by: ${row.moment}`;
    stops(family, s);
    $("key").innerHTML = found.owners.map((size, j) => (size < MIB / 2 ? "" : `<span><i style="background:${d.colours[j]}"></i>`
      + `${d.owners[j]} ${number(size / MIB, 0)}</span>`)).join("");
  }

  // Buttons to where exact answers are: the batches of this setting, or else the settings that have any.
  function stops(family, s) {
    const rows = family.length ? family : firsts.filter((row) => row.gpu === s.gpu);
    const shown = family.length ? rows.map((r) => r.batch).join() : s.gpu;
    if (shown !== $("stops").dataset.shown) {
      $("stops").dataset.shown = shown;
      $("stops").innerHTML = (rows.length ? `<span>exact at ${family.length ? "batch" : ""}</span>` : "") + rows.map((row) =>
        `<button data-row="${d.exact.indexOf(row)}" class="${row.fits ? "" : "bad"}">${family.length ? row.batch : named(row)}</button>`).join("");
    }
    $("stops").querySelectorAll("button").forEach((button) =>
      button.setAttribute("aria-pressed", family.length > 0 && d.exact[button.dataset.row].batch === s.batch));
  }

  function named(row) {
    const model = Object.keys(d.sizes).find((name) => shape.every((part, j) => row[part] === d.sizes[name][j])) || "custom";
    return [model, `${number(row.length, 0)} tokens`, ...knobs.map((name) => row[name]).filter((word, j) => !j || word !== d.knobs[knobs[j]][0])].join(", ");
  }

  function go(row) {
    $("model").value = named(row).split(",")[0];
    [...shape, ...knobs].forEach((name) => { $(name).value = row[name]; });
    $("length").max = row.context;
    $("batch").max = Math.max(+$("batch").max, row.batch);
    $("batch").value = row.batch;
    $("length").value = row.length;
    draw();
  }

  function model() {
    const size = d.sizes[$("model").value];
    shape.forEach((name, j) => {
      $(name).disabled = Boolean(size);
      if (size) $(name).value = size[j];
    });
    $("length").max = $("context").value;
    $("length").value = Math.min(+$("length").value, +$("context").value);
    draw();
  }

  root.querySelectorAll("input, select").forEach((knob) => knob.addEventListener("input", knob === $("model") ? model : draw));
  $("stops").addEventListener("click", (event) => { if (event.target.dataset.row) go(d.exact[event.target.dataset.row]); });
  $("context").addEventListener("input", () => { $("length").max = $("context").value; });
  model();
  root.classList.add("alive");
})

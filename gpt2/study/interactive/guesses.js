// The reader's guesses on a page without a kernel: kept by the browser, and scored where `d.truth` is given.
((root, d) => {
  const $ = (name) => root.querySelector(`[data-is="${name}"]`), key = "where-training-memory-goes.guesses";
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(key)) || {}; } catch { kept = {}; }

  function verdict(guess, truth) {
    if (guess === undefined || guess === "") return "no guess";
    if (typeof truth === "string") return guess === truth ? "right" : "wrong";
    const ratio = guess / truth;
    if (!Number.isFinite(ratio) || ratio <= 0) return "no guess";
    if (ratio >= 0.95 && ratio <= 1.05) return "right";
    return ratio < 1 ? `${(1 / ratio).toFixed(1)} times too low` : `${ratio.toFixed(1)} times too high`;
  }

  function score() {
    for (const [name, truth] of Object.entries(d.truth)) {
      $(`${name}-is`).textContent = `${typeof truth === "number" ? truth.toLocaleString("en-US") : truth}: ${verdict(kept[name], truth)}`;
    }
  }

  d.names.forEach((name) => {
    if (kept[name] !== undefined) $(name).value = kept[name];
    $(name).addEventListener("input", () => {
      kept[name] = $(name).type === "number" && $(name).value !== "" ? +$(name).value : $(name).value;
      try { localStorage.setItem(key, JSON.stringify(kept)); } catch { $("note").textContent = "This browser keeps nothing for pages like this one."; }
      score();
    });
  });
  score();
  root.classList.add("alive");
})

"use strict";
// Elements and formatted numbers.
const Dom = (() => {
  const OFF = -Infinity; // a threshold that every score reaches
  const { fixed } = Stats;
  const by = (id) => document.getElementById(id);
  const count = (n) => n.toLocaleString("en-US");

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  const percent = (k, n) => fixed(100 * (n ? k / n : 0), 1);
  const ends = ([lo, hi]) => `[${fixed(100 * lo, 1)}, ${fixed(100 * hi, 1)}]`;
  const share = (k, n) => `${percent(k, n)}% ${ends(Stats.wilson(k, n))}`;
  const signed = (x, digits) => {
    const text = fixed(x, digits);
    return Number(text) === 0 ? `+${fixed(0, digits)}` : Number(text) > 0 ? `+${text}` : text;
  };

  function threshold(t, unit) {
    if (t === OFF) return "any";
    if (t === Infinity) return "∞";
    return unit ? fixed(t, 3) : String(Number(t.toPrecision(4)));
  }

  return { OFF, by, count, el, percent, share, signed, threshold };
})();

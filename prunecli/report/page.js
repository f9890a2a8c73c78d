const themes = THEMES;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let views = [];

async function draw(isDark) {
  views.forEach((view) => view.finalize());
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = charts.map((chart) =>
    vegaEmbed(chart, JSON.parse(chart.previousElementSibling.textContent), {
      actions: false,
      ast: true, // expressions are interpreted: the page's policy forbids eval
      config: themes[isDark ? "dark" : "light"],
      renderer: "svg",
      tooltip: { theme: isDark ? "dark" : "light" },
    })
  );
  views = (await Promise.all(drawn)).map((result) => result.view);
}

draw(dark.matches);
dark.addEventListener("change", () => draw(dark.matches));
window.addEventListener("beforeprint", () => draw(false));
window.addEventListener("afterprint", () => draw(dark.matches));

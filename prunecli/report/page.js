const isDark = window.matchMedia("(prefers-color-scheme: dark)").matches;
for (const chart of document.querySelectorAll(".chart")) {
  vegaEmbed(chart, JSON.parse(chart.previousElementSibling.textContent), {
    actions: false,
    ast: true, // expressions are interpreted: the page's policy forbids eval
    config: THEME,
    renderer: "svg",
    tooltip: { theme: isDark ? "dark" : "light" },
  });
}

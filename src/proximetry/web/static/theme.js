// Before the first paint, so that a chosen theme does not flash.
try {
  const chosen = localStorage.getItem("proximetry-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; then the system's theme is taken.
}

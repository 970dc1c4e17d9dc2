// Set the saved theme before the first paint.
try {
  const theme = localStorage.getItem("proximetry-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Without storage, the system's theme applies.
}

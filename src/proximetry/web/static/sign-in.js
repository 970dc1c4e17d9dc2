// Exchange the token for a cookie, then load the page.

const problem = document.getElementById("problem");

document.getElementById("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.hidden = true;
  const token = document.getElementById("token").value.trim();
  const valid = /^[A-Za-z0-9._~-]+$/.test(token);
  try {
    const response = valid && await fetch("sign-in", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
    if (response?.ok) return location.reload();
    problem.textContent = "This is not the token of this server.";
  } catch {
    problem.textContent = "The server cannot be reached.";
  }
  problem.hidden = false;
});

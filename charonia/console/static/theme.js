// Sets the theme that was chosen before the page is drawn; without a choice it is the system's. Shows what needs scripts.
"use strict";
(() => {
  document.documentElement.dataset.scripts = "on";
  let chosen = null;
  try { chosen = localStorage.getItem("charonia-theme"); } catch { /* storage is off */ }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();

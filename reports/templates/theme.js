(function () { // before the first paint: what the reader chose in an earlier report, else what the system prefers
  let theme = null;
  try { theme = localStorage.getItem("memopt-theme"); } catch (error) { theme = null; }
  const asked = /[#&]theme=(dark|light)/.exec(location.hash);
  if (asked) theme = asked[1];
  if (theme !== "dark" && theme !== "light") theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme;
})();

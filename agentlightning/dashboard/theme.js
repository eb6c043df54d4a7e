// The theme: as the system has it, light, or dark; the browser keeps what was chosen.

const THEME = "agl-theme";
const NAMES = { "": "Auto", light: "Light", dark: "Dark" };
const MARKS = { "": "◐", light: "☀", dark: "☾" };

/** Make a button that goes from one theme to the next. */
export function offerThemes(button) {
  const order = Object.keys(NAMES);
  const use = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = `${MARKS[theme]} ${NAMES[theme]}`;
    button.setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
  };
  const kept = localStorage.getItem(THEME) ?? "";
  let current = order.includes(kept) ? kept : "";
  use(current);
  button.addEventListener("click", () => {
    current = order[(order.indexOf(current) + 1) % order.length];
    localStorage.setItem(THEME, current);
    use(current);
  });
}

const rows = [...document.querySelectorAll("details.answer")];
const said = rows.map((row) => row.textContent.toLowerCase());
const search = document.getElementById("search");
const unsound = document.getElementById("unsound");
const shown = document.getElementById("shown");

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  rows.forEach((row, n) => {
    const fits = words.every((word) => said[n].includes(word));
    row.hidden = !fits || (unsound.checked && !row.classList.contains("unsound"));
    count += row.hidden ? 0 : 1;
  });
  shown.textContent = `${count} of ${rows.length} prompts`;
}

search.addEventListener("input", filter);
unsound.addEventListener("change", filter);
document.getElementById("unfold").addEventListener("click", () => {
  const visible = rows.filter((row) => !row.hidden);
  const open = !visible.every((row) => row.open);
  visible.forEach((row) => { row.open = open; });
});
filter();

// A click on a heading sorts by it, a second one the other way; empty cells stay at the end. A
// switch, where there is one, shows the further columns.
efx.block("table.js", (element) => {
  const further = element.querySelector(".switch input")
  further?.addEventListener("change", () => {
    element.querySelector("table").classList.toggle("all", further.checked)
  })
  const body = element.querySelector("tbody")
  const headings = [...element.querySelectorAll("th")]
  headings.forEach((heading, column) => {
    const numeric = heading.classList.contains("number")
    const compare = numeric
      ? (a, b) => Number(a) - Number(b)
      : (a, b) => a.localeCompare(b, "en", { numeric: true })
    heading.querySelector("button").addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending"
      for (const other of headings) other.removeAttribute("aria-sort")
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending")
      const keyed = [...body.rows].map((row) => [row.cells[column].dataset.key, row])
      keyed.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === "")
        return descending ? compare(b, a) : compare(a, b)
      })
      body.append(...keyed.map(([, row]) => row))
    })
  })
})

// The samples of the runs beside each other: of each the last one up to the chosen step.
efx.block("samples.js", (element, { runs }) => {
  const form = element.querySelector("form")
  const columns = element.querySelector(".samples")

  function draw() {
    const step = Number(form.elements.step.value)
    columns.replaceChildren(
      ...runs.map((run) => {
        const sample = run.samples.findLast((one) => one.step <= step)
        const article = document.createElement("article")
        const heading = document.createElement("h3")
        const swatch = document.createElement("span")
        swatch.className = "swatch"
        swatch.style.background = run.colour
        heading.append(swatch, sample ? `${run.name}, step ${sample.step}` : run.name)
        const text = document.createElement("pre")
        text.textContent = sample ? sample.text : "(no sample up to this step)"
        article.append(heading, text)
        return article
      }),
    )
  }

  form.addEventListener("change", draw)
  draw()
})

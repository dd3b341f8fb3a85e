// Curves of the runs: what is drawn, over what, of which runs, is chosen on the page.
efx.block("curves.js", (element, { axes, metrics, runs }) => {
  const form = element.querySelector("form")
  const figure = element.querySelector(".curves")
  const hidden = new Set()
  const WORDS = { "train/loss": "training", "eval/loss": "held-out" }

  // Means of `count` successive values, from the first on which there are so many.
  function smoothed(values, count) {
    if (count < 2) return values
    return values.map((value, i) => {
      const part = values.slice(Math.max(0, i - count + 1), i + 1).filter((x) => x !== null)
      return value === null ? null : part.reduce((a, b) => a + b, 0) / part.length
    })
  }

  function trace(run, column, axis, faint, several, count) {
    const { rows, values } = run.columns[column]
    const means = smoothed(values, count)
    const places = rows.map((row) => run.axes[axis][row])
    const known = places.map((x, i) => i).filter((i) => places[i] !== null)
    return {
      type: "scatter",
      x: known.map((i) => places[i]),
      y: known.map((i) => means[i]),
      name: efx.plain(several ? `${run.name}: ${WORDS[column] ?? column}` : run.name),
      mode: !faint && known.length < 40 ? "lines+markers" : "lines",
      line: { color: run.colour, dash: run.dash, width: faint ? 1.25 : 2 },
      marker: { size: 6 },
      opacity: faint ? 0.6 : 1,
      hovertemplate: "%{fullData.name}<br>%{x}, %{y:.5~g}<extra></extra>",
    }
  }

  function draw() {
    const metric = metrics[Number(form.elements.metric.value)]
    const axis = form.elements.axis.value
    const count = Number(form.elements.smooth.value) || 1
    const several = metric.columns.length > 1
    element.querySelector(".widths").hidden = !several
    const traces = runs
      .filter((run) => !hidden.has(run))
      .flatMap((run) =>
        metric.columns
          .filter((column) => column in run.columns)
          .map((column, i) => trace(run, column, axis, several && i === 0, several, count)),
      )
    const kind = (name) => (form.elements[name].checked ? "log" : "linear")
    efx.plot(figure, traces, {
      xaxis: {
        title: { text: axes[axis] },
        type: kind("log-x"),
        exponentformat: axis === "flops" ? "SI" : "B",
        hoverformat: axis === "step" ? ",d" : ".4~s",
        rangemode: "tozero",
      },
      yaxis: { title: { text: efx.plain(metric.title) }, type: kind("log-y") },
      hovermode: "closest",
      showlegend: false,
      // What was zoomed into stays while runs are switched on and off.
      uirevision: JSON.stringify([axis, metric.title, kind("log-x"), kind("log-y")]),
    })
  }

  const legend = element.querySelector(".legend")
  const buttons = new Map()

  // Shows those of the runs that are not in `off`.
  function show(off) {
    hidden.clear()
    for (const run of off) hidden.add(run)
    for (const [run, button] of buttons) button.setAttribute("aria-pressed", String(!hidden.has(run)))
    draw()
  }

  for (const run of runs) {
    const button = document.createElement("button")
    button.type = "button"
    button.title = run.about ? `${run.name}\n${run.about}` : run.name
    button.setAttribute("aria-pressed", "true")
    const line = document.createElement("span")
    line.className = "line"
    const style = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "double" }[run.dash]
    line.style.borderTop = `3px ${style} ${run.colour}`
    button.append(line, run.label)
    button.addEventListener("click", () => {
      show(hidden.has(run) ? [...hidden].filter((one) => one !== run) : [...hidden, run])
    })
    button.addEventListener("dblclick", () => show(runs.filter((one) => one !== run)))
    buttons.set(run, button)
    legend.append(button)
  }
  element.querySelector(".runs .all").addEventListener("click", () => show([]))
  element.querySelector(".runs .none").addEventListener("click", () => show(runs))
  form.addEventListener("change", draw)
  form.addEventListener("submit", (event) => event.preventDefault())
  draw()
})

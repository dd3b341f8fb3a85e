// What the blocks of a page share; see efx/studies/page.py.
"use strict"

const efx = {
  // {name of a script: the function that it gave}
  scripts: {},
  figures: new Set(),

  block(name, start) {
    this.scripts[name] = start
  },

  // Text for Plotly, which would take what looks like a tag for one.
  plain(text) {
    return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;")
  },

  // The page's own colours, as a template of Plotly's.
  theme() {
    const style = getComputedStyle(document.documentElement)
    const colour = (name) => style.getPropertyValue(name).trim()
    const axis = {
      gridcolor: colour("--grid"),
      linecolor: colour("--line"),
      zerolinecolor: colour("--line"),
      tickcolor: colour("--line"),
      automargin: true,
    }
    return {
      layout: {
        font: { family: "system-ui, sans-serif", size: 13, color: colour("--text") },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        xaxis: axis,
        yaxis: axis,
        margin: { l: 60, r: 20, t: 20, b: 50 },
        hoverlabel: {
          bgcolor: colour("--raised"),
          bordercolor: colour("--line"),
          font: { color: colour("--text") },
          namelength: -1,
          align: "left",
        },
        modebar: {
          color: colour("--quiet"),
          activecolor: colour("--accent"),
          bgcolor: "rgba(0,0,0,0)",
        },
        legend: { bgcolor: "rgba(0,0,0,0)" },
      },
    }
  },

  // Draws a figure, or draws it anew. Gives Plotly's promise of it.
  plot(element, traces, layout) {
    this.figures.add(element)
    return Plotly.react(
      element,
      traces,
      { ...layout, template: this.theme() },
      {
        responsive: true,
        displaylogo: false,
        // Plotly would offer to upload the figure.
        showSendToCloud: false,
        plotlyServerURL: "",
        modeBarButtonsToRemove: ["select2d", "lasso2d"],
      },
    )
  },

  begin() {
    for (const element of document.querySelectorAll(".block[data-script]")) {
      const data = JSON.parse(element.querySelector(":scope > script").textContent)
      this.scripts[element.dataset.script](element, data)
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const element of this.figures) Plotly.relayout(element, { template: this.theme() })
    })
  },
}

document.addEventListener("DOMContentLoaded", () => efx.begin())

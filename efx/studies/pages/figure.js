efx.block("figure.js", (element, { traces, layout }) => {
  efx.plot(element.querySelector(".figure"), traces, layout)
})

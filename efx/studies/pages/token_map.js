// The text of a map of tokens, its grid of tokens by blocks, and the path of the token that the
// reader points at; see efx/studies/token_map.py for `data`.
efx.block("token_map.js", (element, data) => {
  const find = (selector) => element.querySelector(selector)
  const make = (tag, text, kind) => {
    const made = document.createElement(tag)
    if (text !== undefined) made.textContent = text
    if (kind) made.className = kind
    return made
  }
  const ROW = 22
  const length = data.ids.length
  const number = (x, digits = 3) => (x === null ? "–" : Number(x.toPrecision(digits)).toString())
  const percent = (x) => (x === null ? "–" : `${Number((100 * x).toFixed(1))}%`)

  // ---- colours: a function of a value, and what explains it ----

  const EMPTY = "rgba(0,0,0,0)"
  const shade = (share, rgb = "37,99,201") =>
    `rgba(${rgb},${(0.06 + 0.84 * Math.min(1, Math.max(0, share))).toFixed(3)})`
  const classes = (i) =>
    i < data.colours.length ? data.colours[i] : `hsl(${((i * 137.508) % 360).toFixed(0)},55%,55%)`

  function bounds(lists) {
    let low = Infinity
    let high = -Infinity
    for (const list of lists) {
      for (const x of list) {
        if (x === null) continue
        low = Math.min(low, x)
        high = Math.max(high, x)
      }
    }
    return low <= high ? [low, high] : [0, 1]
  }

  // {entries: [[name, colour]]} of few values, {scale: colours, low, high} of many.
  function paletteOf(kind, words, lists) {
    const [low, high] = bounds(lists)
    if (kind === "flag") {
      const entries = [[words[0], shade(0.08)], [words[1], shade(0.85)]]
      return { entries, low: -0.5, high: 1.5 }
    }
    if (kind === "count" || kind === "class") {
      const entries = []
      for (let i = 0; i <= high; i++) {
        entries.push([String(i), kind === "class" ? classes(i) : shade(high ? i / high : 0)])
      }
      return { entries, low: -0.5, high: high + 0.5 }
    }
    if (low < 0) {
      const size = Math.max(-low, high)
      const scale = ["rgb(224,110,40)", "rgba(127,143,163,0.12)", "rgb(37,99,201)"]
      return { scale, low: -size, high: size }
    }
    const top = kind === "fraction" ? 1 : high
    const said = kind === "fraction" ? percent : number
    return { scale: [shade(0), shade(1)], low: 0, high: top, said }
  }

  function plotlyScale({ entries, scale }) {
    if (scale) return scale.map((colour, i) => [i / (scale.length - 1), colour])
    return entries.flatMap(([, colour], i) => [
      [i / entries.length, colour],
      [(i + 1) / entries.length, colour],
    ])
  }

  function explain(place, { entries, scale, low, high, said = number }, blank) {
    place.replaceChildren()
    const entry = (name, colour) => {
      const span = make("span")
      const swatch = make("i")
      swatch.style.background = colour
      span.append(swatch, name)
      place.append(span)
    }
    if (scale) {
      const bar = make("span", undefined, "scale")
      bar.style.background = `linear-gradient(to right, ${scale.join(",")})`
      place.append(make("span", said(low)), bar, make("span", said(high)))
    } else {
      entries.forEach(([name, colour]) => entry(name, colour))
    }
    if (blank) entry("nothing is decided here", EMPTY)
  }

  // ---- the text ----

  const spans = []
  const starts = []
  const tokens = find(".tokens")
  const codeOf = (character) => `\\x${character.codePointAt(0).toString(16).padStart(2, "0")}`
  data.pieces.forEach((piece) => {
    const span = make("span")
    const start = spans.length ? starts.at(-1) + data.pieces[spans.length - 1].count : 0
    if (/^(\\x[0-9a-f]{2})+$|^⟨.*⟩$/.test(piece.text)) span.classList.add("odd")
    // White space at the end of a line would be lost, and so would what is of no width. What turns
    // the direction of writing would turn the tokens that follow it.
    const alone = /^[\r\p{Cf}]+$/u.test(piece.text)
    for (const part of piece.text.split(alone ? /(.)/su : /([\n\t\u202a-\u202e\u2066-\u2069])/u)) {
      if (part === "\n") span.append(make("span", "↵", "mark"), "\n")
      else if (part === "\t") span.append(make("span", "→", "mark"), "\t")
      else if (/^[\r\p{Cf}]$/u.test(part)) span.append(make("span", codeOf(part), "mark"))
      else span.append(part)
    }
    tokens.append(span)
    spans.push(span)
    starts.push(start)
  })
  const pieceOf = []
  data.pieces.forEach((piece, i) => {
    for (let k = 0; k < piece.count; k++) pieceOf.push(i)
  })
  const scales = {
    "entropy": ["entropy", number, "entropy of the next token in nats"],
    "loss": ["loss", number, "loss of the next token in nats"],
  }

  function colourText() {
    const [key, said, title] = scales[by.value]
    const [low, high] = bounds([data[key]])
    const colour = (x) => (x === null ? EMPTY : shade(0.6 * ((x - low) / (high - low || 1))))
    spans.forEach((span, i) => {
      const colours = []
      for (let k = 0; k < data.pieces[i].count; k++) colours.push(colour(data[key][starts[i] + k]))
      span.style.background =
        colours.length === 1
          ? colours[0]
          : `linear-gradient(to right, ${colours
              .flatMap((c, k) => [
                `${c} ${(100 * k) / colours.length}%`,
                `${c} ${(100 * (k + 1)) / colours.length}%`,
              ])
              .join(",")})`
    })
    explain(find(".of-text"), { scale: [shade(0), shade(0.6)], low, high, said })
    find(".of-text").append(make("span", title))
  }

  // ---- the grid ----

  const wide = data.pieces.some((piece) => piece.short.length > 2 * piece.count)
  const cell = 18
  const longest = Math.max(...data.pieces.map((piece) => [...piece.short].length))
  const top = wide ? 16 + 8 * longest : 30
  const middle = data.pieces.map((piece, i) => starts[i] + (piece.count - 1) / 2)
  // A browser draws no picture of any width.
  const PART = 1024
  const heatmaps = []
  for (let begin = 0; begin < length; begin += PART) heatmaps.push(make("div", undefined, "heatmap"))
  find(".cells").prepend(...heatmaps)

  // A quantity whose rows are not compared with each other, each over its largest: of one scale
  // for all, a row with large numbers would leave no colour to the others.
  function onOwnScales(of) {
    if (!of.by_row) return of
    const over = (row) => {
      const size = Math.max(...bounds([row]).map(Math.abs)) || 1
      return row.map((x) => (x === null ? null : x / size))
    }
    return { ...of, numbers: of.values, values: of.values.map(over) }
  }

  function drawGrid() {
    const chosen = onOwnScales(data.quantities[quantity.selectedIndex])
    const palette = paletteOf(chosen.kind, chosen.words, chosen.values)
    const blank = chosen.values.some((row) => row.includes(null))
    explain(find(".of-grid"), palette, blank)
    find(".of-grid").prepend(make("span", chosen.about))
    if (chosen.by_row) find(".of-grid").append(make("span", "over the largest of each row"))
    const names = find(".names")
    names.replaceChildren(...chosen.names.map((name) => make("div", name)))
    names.style.paddingTop = `${top}px`
    names.querySelectorAll("div").forEach((name, row) => {
      const [low, high] = bounds([(chosen.numbers ?? chosen.values)[row]])
      name.title = chosen.by_row ? `${name.textContent}: ${number(low)} to ${number(high)}` : name.textContent
    })
    return Promise.all(heatmaps.map((heatmap, i) => drawPart(heatmap, i * PART, chosen, palette)))
  }

  // The tokens from `begin` on, as many as one picture has.
  function drawPart(heatmap, begin, chosen, palette) {
    const count = Math.min(PART, length - begin)
    const height = top + ROW * chosen.names.length + 6
    heatmap.style.width = `${cell * count}px`
    heatmap.style.height = `${height}px`
    const places = middle.map((at, i) => [at, i]).filter(([at]) => at >= begin && at < begin + count)
    const trace = {
      type: "heatmap",
      x0: begin,
      z: chosen.values.map((row) => row.slice(begin, begin + count)),
      colorscale: plotlyScale(palette),
      zmin: palette.low,
      zmax: palette.high,
      showscale: false,
      hoverinfo: "none",
      hoverongaps: true,
      xgap: 1,
      ygap: 1,
    }
    const layout = {
      width: cell * count,
      height,
      margin: { l: 0, r: 0, t: top, b: 6 },
      dragmode: false,
      xaxis: {
        side: "top",
        range: [begin - 0.5, begin + count - 0.5],
        tickvals: places.map(([at]) => at),
        ticktext: places.map(([, i]) => efx.plain(data.pieces[i].short)),
        tickfont: { family: "ui-monospace, monospace", size: 12 },
        tickangle: wide ? -90 : 0,
        automargin: false,
        showgrid: false,
        zeroline: false,
        fixedrange: true,
      },
      yaxis: {
        range: [chosen.names.length - 0.5, -0.5],
        visible: false,
        automargin: false,
        fixedrange: true,
      },
    }
    return efx.plot(heatmap, [trace], layout)
  }

  // ---- the path of a token ----

  const path = find(".path")
  let kept = null

  function word(of, value) {
    if (value === null) return null
    if (of.kind === "flag") return of.words[value]
    if (of.kind === "fraction") return `${of.title} ${percent(value)}`
    return `${of.title} ${number(value)}`
  }

  function show(token) {
    const piece = data.pieces[pieceOf[token]]
    element.querySelectorAll(".tokens .on").forEach((span) => span.classList.remove("on"))
    spans[pieceOf[token]].classList.add("on")
    const cursor = find(".cursor")
    cursor.hidden = false
    cursor.style.left = `${cell * token}px`
    cursor.style.width = `${cell}px`
    const facts = make("dl")
    const fact = (name, value) => facts.append(make("dt", name), make("dd", value))
    const part = piece.count > 1 ? `, ${token - starts[pieceOf[token]] + 1} of ${piece.count}` : ""
    fact("token", `number ${token}${part}, id ${data.ids[token]}`)
    fact("entropy", `${number(data.entropy[token])} nats`)
    fact("loss", data.loss[token] === null ? "next token not known" : `${number(data.loss[token])} nats`)
    const blocks = new Map(data.names.map((name) => [name, []]))
    const servedBy = new Set(Object.keys(data.served))
    for (const of of data.quantities) {
      of.names.forEach((name, row) => {
        const experts = ["expert", "heaviest"].includes(of.key) && servedBy.has(name)
        const said = experts ? null : word(of, of.values[row][token])
        if (said !== null) blocks.get(name).push([of, said, of.values[row][token]])
      })
    }
    const list = make("ol")
    for (const [name, all] of blocks) {
      const item = make("li")
      item.append(make("b", name))
      for (const [of, said, value] of all) {
        item.append(" · ", make("span", said))
        if (of.key === "computed" && value === 0) item.classList.add("skipped")
      }
      if (servedBy.has(name) && data.served[name][token].length) {
        const experts = data.served[name][token].map(([e, weight]) => `${e} (${percent(weight)})`)
        item.append(" · ", make("span", `experts ${experts.join(", ")}`))
      }
      if (item.children.length > 1) list.append(item)
    }
    path.replaceChildren(make("h3", piece.short), facts, list)
    path.dataset.token = token
  }

  const point = (token) => {
    if (kept === null) show(token)
  }
  const click = (token) => {
    kept = kept === token ? null : token
    show(token)
  }
  const tokenAt = (event) => {
    const span = event.target.closest(".tokens > span")
    if (!span) return null
    const i = spans.indexOf(span)
    const box = span.getBoundingClientRect()
    const k = Math.floor(((event.clientX - box.left) / box.width) * data.pieces[i].count)
    return starts[i] + Math.min(data.pieces[i].count - 1, Math.max(0, k))
  }
  tokens.addEventListener("mousemove", (event) => {
    const token = tokenAt(event)
    if (token !== null) point(token)
  })
  tokens.addEventListener("click", (event) => {
    const token = tokenAt(event)
    if (token === null) return
    click(token)
    find(".cells").scrollTo({ left: cell * token - find(".cells").clientWidth / 2 })
  })

  const by = find(".by")
  by.append(...Object.keys(scales).map((name) => make("option", name)))
  by.addEventListener("change", colourText)
  const quantity = find(".quantity")
  quantity.append(...data.quantities.map((of) => make("option", of.title)))
  quantity.addEventListener("change", drawGrid)
  colourText()
  drawGrid().then(() => {
    for (const heatmap of heatmaps) {
      heatmap.on("plotly_hover", (event) => {
        point(event.points[0].x)
        const { offsetTop, offsetHeight } = spans[pieceOf[event.points[0].x]]
        const above = offsetTop - tokens.offsetTop
        const seen = above >= tokens.scrollTop && above + offsetHeight <= tokens.scrollTop + tokens.clientHeight
        if (!seen) tokens.scrollTop = above - tokens.clientHeight / 2
      })
      heatmap.on("plotly_click", (event) => click(event.points[0].x))
    }
  })
  show(0)
})

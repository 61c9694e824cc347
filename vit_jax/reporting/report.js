// Charts, sortable tables and the attention explorer of report.html. It makes no requests.
'use strict';

const DATA = JSON.parse(document.getElementById('data').textContent);

for (const place of document.querySelectorAll('[data-chart]')) {
  vegaEmbed(place, DATA.charts[place.dataset.chart], {
    mode: 'vega-lite', renderer: 'svg', actions: false, ast: true, defaultStyle: false,
    tooltip: {disableDefaultStyle: true},
  }).then(() => place.setAttribute('data-drawn', ''), (error) => console.error(error));
}

// A click on a header sorts by that column; a second click reverses the order.
for (const table of document.querySelectorAll('table[data-sortable]')) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => header.querySelector('button')?.addEventListener('click', () => {
    const down = header.getAttribute('aria-sort') === 'ascending';
    headers.forEach((other) => other.removeAttribute('aria-sort'));
    header.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => (a === '') - (b === '') || (down ? -1 : 1) * (
      header.classList.contains('n') ? a - b : a.localeCompare(b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}

// The maps of a layer are tiles of one grey picture: see attention.sheet in vit_jax/reporting.
function explore(root, {photos, heads}) {
  const find = (name) => root.querySelector(`.${name}`);
  const [stage, patch, slider, token] = ['stage', 'patch', 'layer', 'token'].map(find);
  const canvases = [...root.querySelectorAll('.heads canvas')];
  const scratch = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const load = (uri) => Object.assign(new Image(), {src: uri});
  for (const photo of photos) {
    photo.picture = load(photo.image);
    photo.sheets = photo.layers.map(load);
  }
  let shown = photos[0];
  let [row, column, ofToken] = shown.queries.map((n) => n >> 1).concat(false);

  function draw() {
    const [rows, columns] = shown.queries;
    const [height, width] = shown.keys;
    const sheet = shown.sheets[slider.value - 1];
    const waiting = [sheet, shown.picture].find((image) => !image.complete);
    if (waiting) {
      waiting.addEventListener('load', draw, {once: true});
      return;
    }
    const query = ofToken ? 0 : row * columns + column + Number(shown.class_token);
    scratch.canvas.width = heads * width;
    scratch.canvas.height = height + 1;
    scratch.drawImage(sheet, 0, query * (height + 1), heads * width, height + 1,
      0, 0, heads * width, height + 1);
    const grey = scratch.getImageData(0, 0, heads * width, height + 1).data;
    const at = (x, y) => grey[4 * (y * heads * width + x)];
    scratch.globalCompositeOperation = 'multiply';  // the colour of the light
    scratch.fillStyle = '#ff9a1f';
    scratch.fillRect(0, 0, heads * width, height);
    scratch.globalCompositeOperation = 'copy';
    const words = canvases.map((canvas, head) => {
      const pen = canvas.getContext('2d');
      const all = [0, 0, canvas.width, canvas.height];
      pen.globalCompositeOperation = 'copy';  // the dimmed photo
      pen.globalAlpha = 0.4;
      pen.drawImage(shown.picture, ...all);
      pen.globalCompositeOperation = 'lighter';  // plus light where the head attends
      pen.globalAlpha = 1;
      pen.imageSmoothingEnabled = false;
      pen.drawImage(scratch.canvas, head * width, 0, width, height, ...all);
      pen.imageSmoothingEnabled = true;
      let best = [0, 0];
      for (let y = 0; y < height; y += 1) {
        for (let x = 0; x < width; x += 1) {
          if (at(head * width + x, y) > at(head * width + best[1], best[0])) best = [y, x];
        }
      }
      const share = `${(100 * (at(head * width, height) / 255) ** 2).toFixed(1)} %`;
      const place = `row ${best[0] + 1}, column ${best[1] + 1}`;
      canvas.setAttribute('aria-label', `Head ${head + 1} attends most to ${place}: ${share}`);
      canvas.nextElementSibling.textContent = `head ${head + 1}: ${share}`;
      return `head ${head + 1}: ${place}, ${share}`;
    });
    patch.hidden = ofToken;
    patch.style.cssText = `left:${100 * column / columns}%;top:${100 * row / rows}%;` +
      `width:${100 / columns}%;height:${100 / rows}%`;
    const of = ofToken ? 'the class token' : `the patch in row ${row + 1}, column ${column + 1}`;
    find('number').textContent = slider.value;
    find('which').textContent = `Query: ${of}`;
    find('spoken').textContent = `Layer ${slider.value}, query ${of}. It attends most to: ${words.join('; ')}.`;
    token?.setAttribute('aria-pressed', ofToken);
  }

  function choose(newRow, newColumn) {
    row = Math.min(Math.max(newRow, 0), shown.queries[0] - 1);
    column = Math.min(Math.max(newColumn, 0), shown.queries[1] - 1);
    ofToken = false;
    draw();
  }

  stage.addEventListener('click', (event) => {
    const box = stage.getBoundingClientRect();
    choose(Math.floor((event.clientY - box.top) / box.height * shown.queries[0]),
      Math.floor((event.clientX - box.left) / box.width * shown.queries[1]));
  });
  stage.addEventListener('keydown', (event) => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (step) {
      event.preventDefault();
      choose(row + step[0], column + step[1]);
    }
  });
  slider.addEventListener('input', draw);
  token?.addEventListener('click', () => {
    ofToken = !ofToken;
    draw();
  });
  root.querySelectorAll('.photos button').forEach((button, k, all) => button.addEventListener('click', () => {
    all.forEach((other) => other.setAttribute('aria-pressed', other === button));
    shown = photos[k];
    stage.querySelector('img').src = shown.image;
    stage.querySelector('img').alt = `Photo of ${shown.label}`;
    draw();
  }));
  draw();
}

if (DATA.explorer) explore(document.getElementById('explorer'), DATA.explorer);

// The page of `convert --to=web`: photo in, names of classes out, computed on this device alone.
import * as ort from './onnxruntime-web.js';

const TILE = 1024;  // pixels on a side of a part of the photo; browsers limit the size of a canvas
const SHOWN = 5;
const sinc = (x) => x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
// Radius in pixels and weight by distance, as in vit_jax/data/resizing.py.
const KERNELS = {
  bilinear: [1, (x) => 1 - x],
  bicubic: [2, (x) => x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2],
  lanczos3: [3, (x) => sinc(x) * sinc(x / 3)],
};

// The height and width to which a photo is resized before its middle is cropped.
function fittedSize(height, width, {fit, target_size: [targetHeight, targetWidth]}) {
  if (fit === 'squash') return [targetHeight, targetWidth];
  // 'cover' rounds to the nearest pixel, the others round down.
  const halfHeight = fit === 'cover' ? height : 0;
  const halfWidth = fit === 'cover' ? width : 0;
  const newHeight = Math.floor((2 * height * targetWidth + halfWidth) / (2 * width));
  const newWidth = Math.floor((2 * width * targetHeight + halfHeight) / (2 * height));
  return [Math.max(newHeight, targetHeight), Math.max(newWidth, targetWidth)];
}

function cropOffset(difference, fit) {
  const roundsToEven = fit === 'torchvision' || fit === 'squash';
  const odd = roundsToEven ? Math.floor(difference / 2) % 2 : 0;
  return Math.floor((difference + odd) / 2);
}

// The old pixels, from `first` to before `end`, and their weights for each of `count` new pixels of
// a resized side, from `begin` on.
function taps(old, resized, begin, count, {resize, antialias, uint8_resize: roundsPasses}) {
  const scale = old / resized;
  const [radius, kernel] = KERNELS[resize] ?? [];
  const stretch = antialias ? Math.max(scale, 1) : 1;
  // Pillow counts in units of 2^-22, in which sums of products with grey levels are exact.
  const exact = (x) => Math.sign(x) * Math.floor(Math.abs(x) * 2 ** 22 + 0.5) / 2 ** 22;
  return Array.from({length: count}, (_, k) => {
    const low = (begin + k) * scale;
    const high = (begin + k + 1) * scale;
    const middle = (begin + k + 0.5) * scale;
    const overlap = (p) => Math.max(Math.min(high, p + 1) - Math.max(low, p), 0);
    const weight = (p) => kernel(Math.abs(p + 0.5 - middle) / stretch);
    const reach = kernel ? [middle - radius * stretch + 0.5, middle + radius * stretch + 0.5] :
      [low, Math.ceil(high)];
    const first = Math.max(Math.floor(reach[0]), 0);
    const number = Math.min(Math.floor(reach[1]), old) - first;
    const weights = Array.from({length: number}, (_, i) => (kernel ? weight : overlap)(first + i));
    const sum = weights.reduce((a, b) => a + b);
    const normalised = weights.map((x) => (roundsPasses ? exact(x / sum) : x / sum));
    return {first, end: first + number, weights: normalised};
  });
}

// Pillow does this after each of its two passes.
function roundToLevels(pixels) {
  pixels.forEach((x, k) => { pixels[k] = Math.min(Math.max(Math.floor(x + 0.5), 0), 255); });
}

// Whether Pillow resizes the height first: see vit_jax/data/resizing.py.
function isHeightFirst(photo, [height, width]) {
  const rows = photo.height - height;
  return rows > 0 && rows > 2 * (photo.width - width);
}

// Adds a tile, whose corner is at (x, y) of the photo, to the first pass over rows.
function addToRows(half, tile, {x, y, width, height}, rows, {left, right}) {
  rows.forEach(({first, end, weights}, row) => {
    for (let p = Math.max(first, y); p < Math.min(end, y + height); p += 1) {
      const weight = weights[p - first];
      let k = 4 * (p - y) * width;
      let at = 3 * (row * (right - left) + x - left);
      for (let column = 0; column < width; column += 1, k += 4, at += 3) {
        half[at] += weight * tile[k];
        half[at + 1] += weight * tile[k + 1];
        half[at + 2] += weight * tile[k + 2];
      }
    }
  });
}

// Adds a tile, whose corner is at (x, y) of the photo, to the first pass over columns.
function addToColumns(half, tile, {x, y, width, height}, columns, {top}) {
  columns.forEach(({first, end, weights}, column) => {
    const from = Math.max(first, x);
    const to = Math.min(end, x + width);
    if (from >= to) return;
    for (let row = 0; row < height; row += 1) {
      let red = 0;
      let green = 0;
      let blue = 0;
      for (let p = from, k = 4 * (row * width + from - x); p < to; p += 1, k += 4) {
        const weight = weights[p - first];
        red += weight * tile[k];
        green += weight * tile[k + 1];
        blue += weight * tile[k + 2];
      }
      const at = 3 * ((y - top + row) * columns.length + column);
      half[at] += red;
      half[at + 1] += green;
      half[at + 2] += blue;
    }
  });
}

function isTransparent(tile) {
  for (let k = 3; k < tile.length; k += 4) if (tile[k] < 255) return true;
  return false;
}

// The first pass of resizing: new rows of all columns, or all rows of new columns.
function firstPass(photo, rows, columns, {top, bottom, left, right}, heightFirst, Numbers) {
  const half = new Numbers(3 * (heightFirst ?
    rows.length * (right - left) : (bottom - top) * columns.length));
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  let transparent = false;
  for (let y = top; y < bottom; y += TILE) {
    for (let x = left; x < right; x += TILE) {
      const height = Math.min(TILE, bottom - y);
      const width = Math.min(TILE, right - x);
      Object.assign(pen.canvas, {width, height});  // this also empties it
      pen.drawImage(photo, x, y, width, height, 0, 0, width, height);
      const tile = pen.getImageData(0, 0, width, height).data;
      transparent ||= isTransparent(tile);
      const place = {x, y, width, height};
      if (heightFirst) addToRows(half, tile, place, rows, {left, right});
      else addToColumns(half, tile, place, columns, {top});
    }
  }
  return {half, transparent};
}

// The second pass of resizing: all pixels of the model's image, row by row.
function secondPass(half, rows, columns, {top, left, right}, heightFirst, Numbers) {
  const length = 3 * columns.length;  // of a row
  const pixels = new Numbers(rows.length * length);
  for (let row = 0; row < rows.length; row += 1) {
    for (let k = 0; k < length; k += 1) {
      const {first, weights} = heightFirst ? columns[Math.floor(k / 3)] : rows[row];
      const begin = heightFirst ?
        3 * (row * (right - left) + first - left) + k % 3 : (first - top) * length + k;
      const step = heightFirst ? 3 : length;
      pixels[row * length + k] = weights.reduce(
        (sum, weight, i) => sum + weight * half[begin + i * step], 0);
    }
  }
  return pixels;
}

// The model's view of a photo: red, green and blue from 0 to 255, row by row.
export async function see(file, record) {
  const photo = await createImageBitmap(file, {  // turned upright as its EXIF data says
    premultiplyAlpha: 'none', colorSpaceConversion: 'none'}).catch(() => {
    throw new Error(`${file.name} cannot be read: it is damaged, too large, or no photo of a ` +
      'kind that this browser knows (JPEG, PNG, WebP, AVIF, GIF).');
  });
  const {image_size: size, fit, uint8_resize: roundsPasses} = record;
  const resized = fittedSize(photo.height, photo.width, record);
  const [rows, columns] = [photo.height, photo.width].map((old, axis) => taps(
    old, resized[axis], cropOffset(resized[axis] - size[axis], fit), size[axis], record));
  // The part of the photo that the model sees.
  const part = {top: rows[0].first, bottom: rows.at(-1).end,
    left: columns[0].first, right: columns.at(-1).end};
  // The order of the two passes matters only if each of them rounds.
  const heightFirst = roundsPasses && isHeightFirst(photo, resized);
  const Numbers = roundsPasses ? Float64Array : Float32Array;
  const {half, transparent} = firstPass(photo, rows, columns, part, heightFirst, Numbers);
  photo.close();
  if (roundsPasses) roundToLevels(half);
  const pixels = secondPass(half, rows, columns, part, heightFirst, Numbers);
  if (roundsPasses) roundToLevels(pixels);
  return {pixels: Float32Array.from(pixels), transparent};
}

const find = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

function say(text) {
  find('status').textContent = text;
  find('status').classList.remove('late');
}

// {record, session}. The model runs in a worker, so that the page can be used meanwhile.
async function load() {
  ort.env.wasm.numThreads = 1;  // more threads need headers that a plain server does not send
  ort.env.wasm.proxy = true;
  ort.env.wasm.wasmPaths = {wasm: new URL('onnxruntime-web.wasm', import.meta.url).href};
  const record = await (await fetch('model.json')).json();
  const [height, width] = record.image_size;
  find('about').textContent = `${record.name} · ${record.classes.length.toLocaleString('en')}` +
    `\u00a0classes · ${height}\u00a0×\u00a0${width} pixels`;
  say(`Loading the model (${(record.bytes / 1e6).toFixed(0)} MB) …`);
  return {record, session: await ort.InferenceSession.create('model.onnx')};
}

// Logits and probabilities of a photo, the pixels that the model saw, and the milliseconds it took.
export async function classify(file) {
  const {record, session} = await model;
  const begin = performance.now();
  const {pixels, transparent} = await see(file, record);
  const images = pixels.map((x, k) => (x / 255 - record.mean[k % 3]) / record.std[k % 3]);
  const seen = performance.now();
  const outputs = await session.run({
    images: new ort.Tensor('float32', images, [1, ...record.image_size, 3])});
  const logits = [...outputs.logits.data];
  if (!logits.every(Number.isFinite)) {
    throw new Error(`The model gives values for ${file.name} that are not finite.`);
  }
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const exp = logits.map((x) => Math.exp(x - largest));
  const sum = exp.reduce((a, b) => a + b);
  return {logits, pixels, transparent, reading: seen - begin, model: performance.now() - seen,
    probabilities: record.loss === 'sigmoid' ? logits.map((x) => 1 / (1 + Math.exp(-x))) :
      exp.map((x) => x / sum)};
}

function show(file, {classes, image_size: [height, width], loss}, found) {
  const image = new ImageData(width, height);
  image.data.fill(255);
  // Storing a value rounds it and cuts it off at 0 and 255.
  found.pixels.forEach((x, k) => { image.data[k + Math.floor(k / 3)] = x; });
  Object.assign(find('seen'), {width, height}).getContext('2d').putImageData(image, 0, 0);
  find('seen').classList.toggle('tiny', Math.max(height, width) <= 64);
  find('size').textContent = `The photo as the model sees it: ${height} × ${width} pixels`;
  const best = found.probabilities.map((share, k) => ({share, name: classes[k]}));
  best.sort((a, b) => b.share - a.share);
  find('best').replaceChildren(...best.slice(0, SHOWN).map(({share, name}, rank) => {
    const line = document.createElement('li');
    const [label, number, bar] = [0, 1, 2].map(() => document.createElement('span'));
    label.textContent = name;
    Object.assign(number, {textContent: percent(share), className: 'n'});
    Object.assign(bar, {className: 'bar'}).style.setProperty('--v', share);
    line.classList.toggle('sure', loss === 'sigmoid' ? share >= 0.5 : rank === 0);
    line.append(label, ' ', number, bar);
    return line;
  }));
  find('note').textContent = [loss === 'sigmoid' ?
    'Each class has its own probability; classes from 50 % on are bold.' : '',
  found.transparent ? 'Transparent parts of this picture count as black.' : ''].join(' ');
  find('result').hidden = false;
  const seconds = (x) => `${(x / 1000).toFixed(2)}\u00a0s`;
  say(`${file.name}: ${best[0].name}, ${percent(best[0].share)}. It took ` +
    `${seconds(found.reading + found.model)}; the model took ${seconds(found.model)}.`);
}

let latest = null;
async function take(files) {
  const file = latest = files[0];
  find('result').hidden = true;
  if (!file) {
    say('That is not a file. Drop a photo from a folder, or choose one.');
    return;
  }
  try {
    say(`Looking at ${file.name} …`);
    const [{record}, found] = await Promise.all([model, classify(file)]);
    if (file === latest) show(file, record, found);
  } catch (error) {
    if (file === latest) say(error.message ?? error);
  }
}

const model = load();
model.then(() => latest ?? say('The model is ready.'),
  (error) => say(`The model cannot be loaded: ${error.message ?? error}`));
find('file').disabled = false;
find('file').addEventListener('change', ({target: {files}}) => files.length && take(files));
for (const kind of ['dragover', 'dragleave', 'drop']) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle('over', kind === 'dragover');
    if (kind === 'drop') take(find('file').files = event.dataTransfer.files);
  });
}

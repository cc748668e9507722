// Compiles every `.wgsl` file of a folder with Tint, the WGSL compiler of Dawn and of Chromium.
//
//     node check.mjs FOLDER
//
// Tint is a second opinion on text that naga has already accepted, and the only one of the two that
// proves that every barrier and subgroup operation stands in uniform control flow. Dawn's null
// backend takes a shader through the whole front end without a GPU or a driver.
//
// A file holds one variant and is named after its key. Its first line says which extensions it uses,
// `// requires: f16 subgroups` (or nothing after the colon): Tint wants an `enable` directive for
// each, while naga 30 refuses `enable subgroups;`, so the directives are added here.
//
// Two shaders beside this script are compiled first, one right and one wrong, so that a Tint that
// stopped looking cannot pass for a Tint that found nothing.
//
// Exit status: 0 if all were accepted, 1 if any was refused, 2 if the check itself could not be made.

import { spawnSync } from 'node:child_process';
import { readFileSync, readdirSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const ENABLE = { f16: 'enable f16;', subgroups: 'enable subgroups;' };
const FEATURES = ['shader-f16', 'subgroups'];
// Dawn crashes now and then, whichever shaders it is given. So they are checked by processes of their own, some
// at a time; one that was ended by a signal has said nothing of its shaders, and is started again.
const BATCH = 200;
const ATTEMPTS = 3;

class CheckFailed extends Error {}

async function main() {
  const [first] = process.argv.slice(2);
  if (!first) throw new CheckFailed('usage: node check.mjs FOLDER');
  if (first === '--batch') {
    // The paths come on standard input, the number of those refused goes to standard output.
    process.stdout.write(String(await checkFiles(readFileSync(0, 'utf8').split('\n'))));
    return 0;
  }
  const files = wgslFiles(first);
  let refused = 0;
  for (let start = 0; start < files.length; start += BATCH) {
    refused += checkBatch(files.slice(start, start + BATCH));
  }
  if (refused > 0) {
    console.error(`tint: ${refused} of ${files.length} shaders refused`);
    return 1;
  }
  console.log(`tint: ${files.length} shaders accepted`);
  return 0;
}

// The number of files that are refused, by a process of its own.
function checkBatch(files) {
  for (let attempt = 1; ; attempt += 1) {
    const options = { input: files.join('\n'), stdio: ['pipe', 'pipe', 'inherit'], encoding: 'utf8' };
    const child = spawnSync(process.execPath, [fileURLToPath(import.meta.url), '--batch'], options);
    if (child.status === 0) return Number(child.stdout);
    const how = child.signal ?? `status ${child.status}`;
    if (child.signal === null || attempt === ATTEMPTS) {
      throw new CheckFailed(`checking ${files[0]} and ${files.length - 1} more ended with ${how}`);
    }
    console.error(`tint: Dawn crashed (${how}), starting it again`);
  }
}

async function checkFiles(files) {
  const { create } = await import('webgpu').catch((error) => {
    throw new CheckFailed(`the npm package webgpu is missing; run \`npm ci\` in tests/tint (${error.message})`);
  });
  // The null backend lives as long as `gpu`: keep it in this scope, or node never exits.
  const gpu = create(['backend=null']);
  const device = await requestDevice(gpu);

  await selfTest(device);

  let refused = 0;
  for (const path of files) {
    const problems = await compile(device, path);
    if (problems.length > 0) refused += 1;
    for (const problem of problems) console.error(problem);
  }
  device.destroy();
  return refused;
}

async function requestDevice(gpu) {
  const adapter = await gpu.requestAdapter();
  if (!adapter) throw new CheckFailed('Dawn offers no adapter on its null backend');
  const missing = FEATURES.filter((feature) => !adapter.features.has(feature));
  if (missing.length > 0) throw new CheckFailed(`Dawn's null backend lacks ${missing.join(', ')}`);
  // The highest limits: whether a variant fits a device is the host's decision, not this check's.
  const requiredLimits = {};
  for (const limit of ['maxComputeWorkgroupStorageSize', 'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX',
    'maxComputeWorkgroupSizeY', 'maxStorageBuffersPerShaderStage']) {
    requiredLimits[limit] = adapter.limits[limit];
  }
  return adapter.requestDevice({ requiredFeatures: FEATURES, requiredLimits });
}

async function selfTest(device) {
  const here = join(dirname(fileURLToPath(import.meta.url)), 'selftest');
  const accepted = await compile(device, join(here, 'accepted.wgsl'));
  if (accepted.length > 0) throw new CheckFailed(`self-test: a correct shader was refused:\n${accepted.join('\n')}`);
  const refused = await compile(device, join(here, 'refused.wgsl'));
  if (!refused.some((problem) => problem.includes('workgroupBarrier'))) {
    throw new CheckFailed('self-test: a barrier in non-uniform control flow was accepted');
  }
}

function wgslFiles(folder) {
  let names;
  try {
    names = readdirSync(folder).filter((name) => name.endsWith('.wgsl')).sort();
  } catch (error) {
    throw new CheckFailed(`cannot read ${folder}: ${error.message}`);
  }
  if (names.length === 0) throw new CheckFailed(`no .wgsl file in ${folder}`);
  return names.map((name) => join(folder, name));
}

// Returns what Tint has against the shader, one `path:line:column: message` per problem.
async function compile(device, path) {
  const source = readFileSync(path, 'utf8');
  const firstLine = source.split('\n', 1)[0];
  const requires = /^\/\/ requires:(.*)$/.exec(firstLine.trimEnd());
  if (!requires) return [`${path}:1:1: the first line is not \`// requires: [f16] [subgroups]\``];
  const extensions = requires[1].split(/\s+/).filter((word) => word !== '');
  const unknown = extensions.filter((word) => !(word in ENABLE));
  if (unknown.length > 0) return [`${path}:1:1: unknown extension ${unknown.join(', ')}`];
  // On the first line, before its comment, so that Tint's line numbers are the file's.
  const code = extensions.map((word) => `${ENABLE[word]} `).join('') + source;

  device.pushErrorScope('validation');
  const module = device.createShaderModule({ label: path, code });
  const info = await module.getCompilationInfo();
  const moduleError = await device.popErrorScope();
  const problems = info.messages
    .filter((message) => message.type === 'error')
    .map((message) => describe(path, source, message));
  if (problems.length > 0) return problems;
  if (moduleError) return [`${path}: ${moduleError.message}`];

  const entryPoints = computeEntryPoints(source);
  if (entryPoints.length === 0) return [`${path}: no compute entry point`];
  for (const entryPoint of entryPoints) {
    device.pushErrorScope('validation');
    device.createComputePipeline({ label: path, layout: 'auto', compute: { module, entryPoint } });
    const error = await device.popErrorScope();
    if (error) problems.push(`${path}: entry point ${entryPoint}: ${error.message}`);
  }
  return problems;
}

function describe(path, source, message) {
  const line = source.split('\n')[message.lineNum - 1] ?? '';
  return `${path}:${message.lineNum}:${message.linePos}: ${message.message}\n    ${line.trim()}`;
}

function computeEntryPoints(source) {
  const code = source.replace(/\/\/.*$/gm, '');
  return [...code.matchAll(/@compute\b[^{]*?\bfn\s+(\w+)/g)].map((match) => match[1]);
}

try {
  process.exitCode = await main();
} catch (error) {
  if (!(error instanceof CheckFailed)) throw error;
  console.error(`tint: ${error.message}`);
  process.exitCode = 2;
}

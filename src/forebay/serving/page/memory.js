// The server's memory and the last minute's requests, as it tells them at /state.

const COLORS = {weight: "#4878a8", slot: "#e0a030", cache: "#60a060", constant: "#888",
  pool: "#a070b0", routing: "#c06060"};
const WIDTH = 600, SECONDS = 60;
const mib = nbytes => (nbytes / 1048576).toFixed(1) + " MiB";

/** Shows a state in the elements that `find` gives by id. */
export function showState(state, find) {
  const {memory} = state, kinds = Object.entries(memory.kinds);
  find("memory").replaceChildren(...kinds.map(([kind, nbytes]) => {
    const part = document.createElement("span");
    part.style.width = 100 * nbytes / memory.budget_nbytes + "%";
    part.style.background = COLORS[kind];
    part.title = kind + " " + mib(nbytes);
    return part;
  }));
  find("sizes").textContent = `budget ${mib(memory.budget_nbytes)}; `
    + kinds.map(([kind, nbytes]) => `${kind} ${mib(nbytes)}`).join(", ")
    + `; streamed per step ${mib(memory.streamed_nbytes_per_step)}; process ${mib(memory.process_nbytes)}`;
  find("counts").textContent = `${state.running} of ${state.batch_slots} slots taken, ${state.waiting} waiting`;
  find("timeline").replaceChildren(...state.requests.slice(-20).flatMap(barsOf));
}

/** The bars of a request in row `row`: waiting, its prompt, its answer. */
function barsOf(request, row) {
  const at = ago => WIDTH * (1 - Math.min(SECONDS, ago) / SECONDS), end = request.ended_s ?? 0;
  const starts = [request.arrived_s, request.entered_s, request.first_s];
  return ["#bbb", COLORS.slot, COLORS.weight].flatMap((color, k) => {
    if (starts[k] === null) return [];
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const box = {x: at(starts[k]), width: Math.max(0, at(starts[k + 1] ?? end) - at(starts[k])), y: 8 * row + 1,
      height: 6, fill: color};
    for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
    return [bar];
  });
}

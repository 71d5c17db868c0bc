"""One page that shows the fleet: plain HTML, style and script, from the router alone.

All that engines report is put in as text, never as HTML.
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baton router</title>
<style>
  :root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
  body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; }
  h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
  table { border-collapse: collapse; width: 100%; }
  th, td { border-bottom: 1px solid #8884; padding: .35rem .6rem; text-align: left; }
  th { font-weight: 600; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
  .up { color: #1a7f37; } .down { color: #cf222e; } .unknown { color: #9a6700; }
  .error { font-size: .85rem; opacity: .8; overflow-wrap: anywhere; } #note { opacity: .7; }
</style>
<h1>Baton router</h1>
<p id="note">Loading ...</p>
<main></main>
<script>
const columns = [["engine", ""], ["state", ""], ["model", ""], ["in flight", "number"],
                 ["requests", "number"], ["failures", "number"], ["last error", ""]];
const colours = {refused: "down", draining: "unknown", drained: "unknown"};
function cell(row, text, kind, tag) {
  const made = document.createElement(tag || "td");
  made.textContent = text;
  if (kind) made.className = kind;
  row.append(made);
}
function table(engines) {
  const made = document.createElement("table"), head = made.insertRow();
  for (const [name, kind] of columns) cell(head, name, kind, "th");
  for (const engine of engines) {
    const row = made.insertRow();
    const when = new Date(1000 * engine.last_error_unix_s).toLocaleTimeString();
    cell(row, engine.url);
    cell(row, engine.state, colours[engine.state] || engine.state);
    cell(row, engine.model || "");
    cell(row, engine.in_flight, "number");
    cell(row, engine.requests, "number");
    cell(row, engine.failures, "number");
    cell(row, engine.refused || (engine.last_error ? `${when} ${engine.last_error}` : ""), "error");
  }
  return made;
}
function pairTable(pairs) {
  const made = document.createElement("table"), head = made.insertRow();
  for (const name of ["prefill", "decode", "handed over", "computed", "problem"]) cell(head, name, "", "th");
  for (const pair of pairs) {
    const row = made.insertRow();
    cell(row, pair.prefill);
    cell(row, pair.decode);
    cell(row, pair.handed_over, "number");
    cell(row, pair.computed, "number");
    cell(row, pair.reason || "", "error");
  }
  return made;
}
async function refresh() {
  const note = document.getElementById("note");
  try {
    const state = await (await fetch("fleet", {cache: "no-store"})).json();
    const parts = [];
    for (const [role, engines] of Object.entries(state.engines)) {
      const title = document.createElement("h2");
      title.textContent = role;
      parts.push(title, table(engines));
    }
    if (state.pairs.length) {
      const title = document.createElement("h2");
      title.textContent = "pairs";
      parts.push(title, pairTable(state.pairs));
    }
    document.querySelector("main").replaceChildren(...parts);
    note.textContent = `${state.in_flight} request(s) in flight, policy ${state.policy}, ` +
                       `when prefill fails: ${state.on_prefill_failure}`;
  } catch (error) {
    note.textContent = "The router does not answer.";
  }
  setTimeout(refresh, 1000);
}
refresh();
</script>
</html>
"""

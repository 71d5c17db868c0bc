// Contrast of each text with the first opaque ground under it, as WCAG 2 computes it: [[ratio, where], ...].
const channels = (css) => { const n = css.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
const light = (c) => [.2126, .7152, .0722].reduce((sum, w, i) => {
  const v = c[i] / 255; return sum + w * (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); }, 0);
const groundOf = (e) => { for (; e; e = e.parentElement) {
  const c = channels(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
const found = [];
for (const e of document.querySelectorAll("body *")) {
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  const hasText = [...e.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
  if (!hasText || !box.width || style.visibility === "hidden" || ["SCRIPT", "STYLE", "OPTION"].includes(e.tagName)) continue;
  const isDrawn = e instanceof SVGElement;
  const ink = light(channels(isDrawn ? style.fill : style.color)), ground = light(groundOf(isDrawn ? e.ownerSVGElement : e));
  found.push([(Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05), e.tagName + "." + e.getAttribute("class") + ": " + e.textContent.slice(0, 40)]);
}
return found;

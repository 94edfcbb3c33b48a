// Numbers and times in words.
export const formatCount = number => number.toLocaleString("en");
export const counted = (number, noun) => `${formatCount(number)} ${noun}${number === 1 ? "" : "s"}`;
export const formatRate = rate => rate.toFixed(rate < 9.95 ? 1 : 0);
export const formatShare = share => `${Math.round(100 * share)} %`;
export const formatBytes = bytes =>
  bytes < 1e3 ? counted(bytes, "byte") : bytes < 1e6 ? `${Math.round(bytes / 1e3)} KB` : `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;

export function formatSeconds(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

// Requests to the server, and what it has sent: the gallery and its items.

import { asSentence } from "./dom.js";

const MAX_LISTED = 500; // ids per request
const items = new Map(); // by id

/** Send a request; throw the server's error message. Retry while the server is busy. */
export async function request(path, options = {}, tries = 4) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is `proximetry serve` still running?");
  }
  if (response.status === 503 && response.headers.has("Retry-After") && tries > 1) {
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    return request(path, options, tries - 1);
  }
  if (response.ok && response.headers.get("Content-Type")?.startsWith("image/")) return response.blob();
  const content = await response.json().catch(() => null);
  if (response.ok) return content;
  const error = new Error(asSentence(content?.detail ?? `The server returned status ${response.status}`));
  error.status = response.status;
  throw error;
}

/** Return the description of the gallery; report progress while the server loads it. */
export async function loadGallery(report) {
  for (;;) {
    try {
      return await request("gallery", {}, 1);
    } catch (error) {
      if (error.status === 401) location.reload(); // to sign in
      if (error.status !== 503) throw error;
      report(error.message);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

export function remember(found) {
  for (const item of found) if (item) items.set(item.id, { ...items.get(item.id), ...item });
}

/** Return an item that the server has sent. */
export const known = (id) => items.get(id);

/** Return the items of some ids, in this order, without those that do not exist. */
export async function findItems(ids) {
  const missing = ids.filter((id) => !items.has(id));
  for (let start = 0; start < missing.length; start += MAX_LISTED) {
    remember(await request(`items?ids=${missing.slice(start, start + MAX_LISTED)}`));
  }
  return ids.map(known).filter(Boolean);
}

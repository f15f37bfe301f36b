// Table of the servers that share the queue; hidden if there is only one server.

import { get } from "./api.js";
import { $, make, renderList, setText } from "./dom.js";
import { state } from "./state.js";

export async function readServers() {
  state.servers = (await get("/v1/servers")).data;
}

export function renderServers() {
  $("servers").hidden = state.servers.length < 2;
  renderList($("server-rows"), state.servers, ({ id }) => id, createRow, updateRow);
}

const createRow = () => make("tr", {}, ...Array.from({ length: 6 }, () => make("td")));

function updateRow(row, server) {
  const name = `${server.host} ${server.id.slice(0, 4)}`;
  const seen = `${Math.round(server.seen_seconds)} s ago`;
  const now = server.is_live ? server.state : "gone";
  [name, server.model, now, server.ranks, server.claims, seen].forEach((text, index) => {
    setText(row.children[index], String(text));
  });
}

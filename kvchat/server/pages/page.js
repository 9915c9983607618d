"use strict";
// The page of kvchat's server: saved conversations to read, and where the server allows it a chat.
// HTML comes from the server's own renderer only; every other text enters as text.

const $ = (id) => document.getElementById(id);
const hasChat = document.body.dataset.chat === "yes";
let key = sessionStorage.getItem("key") || "";
let messages = [];
let answering = null; // the AbortController of the answer that is being written

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const error = new Error(said?.error?.message || `The server answers ${response.status}.`);
  error.status = response.status;
  throw error;
}

const post = (path, body, signal) => ask(path, { method: "POST", body: JSON.stringify(body), signal });

function say(text, isError = false) {
  $("facts").textContent = text;
  $("facts").classList.toggle("error", isError);
}

function fail(error) {
  if (error.status === 401) return showLogin(key ? error.message : "");
  say(error.message, true);
}

function showLogin(reason) {
  for (const id of ["places", "ask"]) $(id).hidden = true;
  $("content").replaceChildren();
  $("login").hidden = false;
  say(reason, Boolean(reason));
  $("key").focus();
}

function begin(isChat) {
  answering?.abort();
  answering = null;
  $("send").textContent = "Send";
  $("login").hidden = true;
  $("places").hidden = false;
  $("to-chat").hidden = !hasChat;
  $("ask").hidden = !isChat;
  $("content").replaceChildren();
}

async function showConversations() {
  const { data } = await (await ask("/kvchat/conversations")).json();
  begin(false);
  say(data.length ? "" : "There is no saved conversation yet.");
  const list = make("ul", "", "conversations");
  for (const each of data) {
    const link = make("a", each.title || "(no message)");
    link.href = `#conversation/${each.id}`;
    const when = new Date(each.modified * 1000).toLocaleString();
    const turns = `${each.turns} ${each.turns === 1 ? "turn" : "turns"}`;
    const facts = [when, turns, each.model].filter(Boolean).join(" · ");
    const item = make("li");
    item.append(link, make("div", facts, "facts"));
    list.append(item);
  }
  $("content").append(list);
}

async function showConversation(id) {
  const found = await (await ask(`/kvchat/conversations/${encodeURIComponent(id)}`)).json();
  begin(false);
  say("");
  const shown = make("div");
  shown.innerHTML = found.html;
  $("content").append(shown);
  if (!hasChat || !found.messages.length) return;
  const button = make("button", "Go on from here");
  button.onclick = () => {
    begin(true);
    messages = found.messages;
    $("content").append(shown);
    say("What follows is not saved.");
    $("words").focus();
  };
  $("content").append(button);
}

async function showChat() {
  const { data } = await (await ask("/v1/models")).json();
  begin(true);
  messages = [];
  say(`${data[0].id}. A chat on this page is not saved.`);
  $("words").focus();
}

function article(kind, name) {
  const element = make("article", "", kind);
  element.append(make("h2", name, "who"));
  $("content").append(element);
  return element;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

class Answer {
  constructor() {
    this.element = article("assistant", "Assistant");
    this.words = this.element.appendChild(make("p", "", "plain"));
    this.thinking = null;
    this.facts = "";
  }

  take(event) {
    const delta = event.choices[0]?.delta || {};
    const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 60;
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) this.words.append(delta.content);
    if (event.usage) this.facts = this.inWords(event.usage);
    if (isAtEnd) scrollTo(0, document.body.scrollHeight);
  }

  think(text) {
    if (!this.thinking) {
      const details = make("details");
      this.thinking = make("p", "", "plain");
      details.append(make("summary", "Thinking"), this.thinking);
      this.element.insertBefore(details, this.words);
    }
    this.thinking.append(text);
  }

  inWords(usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const seconds = usage.kvchat.ttft_s.toFixed(2);
    return `${cached} of ${usage.prompt_tokens} tokens from the cache, first word after ${seconds} s`;
  }

  async finish(note) {
    const text = this.words.textContent;
    if (text) {
      const { html } = await (await post("/kvchat/render", { text })).json();
      const rendered = make("div");
      rendered.innerHTML = html;
      this.words.replaceWith(rendered);
    }
    if (note || this.facts) this.element.append(make("p", note || this.facts, "note"));
    return text;
  }
}

async function send(text) {
  article("user", "You").append(make("p", text, "plain"));
  const asked = [...messages, { role: "user", content: text }];
  messages = asked;
  const answer = new Answer();
  const stopping = new AbortController();
  answering = stopping;
  $("send").textContent = "Stop";
  scrollTo(0, document.body.scrollHeight);
  let note = "";
  try {
    const { data } = await (await ask("/v1/models")).json();
    const body = { model: data[0].id, messages: asked, stream: true, stream_options: { include_usage: true } };
    const response = await post("/v1/chat/completions", body, stopping.signal);
    for await (const event of events(response)) answer.take(event);
  } catch (error) {
    note = error.name === "AbortError" ? "(cut off)" : error.message;
    if (error.status === 401) fail(error);
  }
  const said = await answer.finish(note).catch(() => answer.words.textContent);
  // Meanwhile the user may have begun another chat, and asked there.
  if (said && messages === asked) messages = [...asked, { role: "assistant", content: said }];
  if (answering !== stopping) return;
  answering = null;
  $("send").textContent = "Send";
}

function leave() {
  sessionStorage.removeItem("key");
  key = "";
  showLogin("");
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function go() {
  const [place, value] = decoded(location.hash.slice(1)).split(/[/=](.*)/s);
  if (place === "key") {
    key = value;
    sessionStorage.setItem("key", key);
    history.replaceState(null, "", location.pathname); // the key does not stay in the address
    return go();
  }
  if (place === "leave") return leave();
  if (place === "conversation") return showConversation(value).catch(fail);
  if (place === "conversations" || !hasChat) return showConversations().catch(fail);
  return showChat().catch(fail);
}

$("login").onsubmit = (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  sessionStorage.setItem("key", key);
  if (location.hash === "#leave") history.replaceState(null, "", location.pathname);
  go();
};

$("ask").onsubmit = (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = $("words").value.trim();
  if (!text) return;
  $("words").value = "";
  send(text);
};

$("words").onkeydown = (event) => {
  const hasKeyboard = matchMedia("(pointer: fine)").matches;
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !hasKeyboard) return;
  event.preventDefault();
  if (!answering) $("ask").requestSubmit();
};

addEventListener("hashchange", go);
go();

#include "tokens.hpp"

#include <algorithm>

namespace blockcast {
namespace {

constexpr std::string_view kKey = "token_ids\"";
constexpr std::string_view kPrompt = "prompt_";
constexpr auto kNone = std::string_view::npos;
constexpr std::size_t kBlankLine = 3;  // "\n\r\n", the longest end of an event

bool contains(std::string_view text, std::string_view part) { return text.find(part) != kNone; }

std::size_t skip_spaces(std::string_view text, std::size_t at) {
    while (at < text.size() && text[at] == ' ') ++at;
    return at;
}

// Whether `key`, which ends in an opening quotation mark, is there with a text that is not empty.
bool has_text(std::string_view text, std::string_view key) {
    const std::size_t at = text.find(key);
    return at != kNone && at + key.size() < text.size() && text[at + key.size()] != '"';
}

// Where the event ends that begins at `at`, its blank line included.
std::size_t event_end(std::string_view text, std::size_t at) {
    for (std::size_t line = text.find('\n', at); line != kNone; line = text.find('\n', line + 1)) {
        if (line + 1 < text.size() && text[line + 1] == '\n') return line + 2;
        if (line + 2 < text.size() && text[line + 1] == '\r' && text[line + 2] == '\n') return line + 3;
    }
    return kNone;
}

// The numbers of the list (or the null) at `at`; where it ends, kNone where it is neither.
std::size_t read_ids(std::string_view text, std::size_t at, std::vector<std::uint32_t>& ids) {
    if (text.substr(at, 4) == "null") return at + 4;
    if (at >= text.size() || text[at] != '[') return kNone;
    std::uint64_t id = 0;
    bool digits = false;
    for (++at; at < text.size(); ++at) {
        const char c = text[at];
        if (c >= '0' && c <= '9') {
            id = id * 10 + static_cast<std::uint64_t>(c - '0');
            digits = true;
            if (id > 0xffffffff) return kNone;
        } else if (c == ',' || c == ']') {
            if (digits) ids.push_back(static_cast<std::uint32_t>(id));
            if (c == ']') return at + 1;
            id = 0;
            digits = false;
        } else if (c != ' ') {
            return kNone;
        }
    }
    return kNone;
}

}  // namespace

void Tokens::feed(std::string_view content, std::string& out) {
    if (passes_) {
        out.append(content);
        return;
    }
    const bool begun = !pending_.empty();
    if (begun) {
        pending_.append(content);
        content = pending_;
    }
    std::size_t at = 0;
    while (!failed) {
        const std::size_t end = event_end(content, std::max(at, searched_));
        if (end == kNone) break;
        const std::string_view text = content.substr(at, end - at);
        failed = text.substr(0, 14) == "data: {\"error\"" || text.substr(0, 13) == "data:{\"error\"";
        if (failed) break;
        event(text, out);
        at = end;
        searched_ = 0;
    }
    if (at > 0 || !begun) pending_ = std::string(content.substr(at));
    searched_ = std::max(pending_.size(), kBlankLine) - kBlankLine;
    if (pending_.size() > kEventBytesMax) {
        odd = true;
        out += release();
    }
}

std::string Tokens::release() {
    passes_ = true;
    failed = false;
    std::string held;
    held.swap(pending_);
    return held;
}

void Tokens::rewind(bool exact) {
    if (exact) answer.resize(spoken);
    pending_.clear();
    searched_ = 0;
    failed = false;
}

void Tokens::event(std::string_view text, std::string& out) {
    std::string kept;
    const std::size_t before = answer.size();
    const bool cut = take_ids(text, kept);
    const std::string_view passed = cut ? std::string_view(kept) : text;
    const std::size_t delta = passed.find("\"delta\":{");
    if (delta != kNone) {
        const std::string_view inner = passed.substr(delta + 9, 9);
        const bool read = contains(passed, "\"reasoning") || contains(passed, "\"tool_calls\":[{");
        odd |= !read && inner.substr(0, 1) != "}" && inner != "\"content\"" && inner.substr(0, 6) != "\"role\"";
        parsed |= read;
    }
    finished |= contains(passed, "\"finish_reason\":\"");
    if (has_text(passed, delta != kNone ? "\"content\":\"" : "\"text\":\"")) {
        spoken = answer.size();
        odd |= spoken == before && !finished;
    }
    if (contains(passed, "\"choices\":[{")) last.assign(passed);
    ++events;
    out.append(passed);
}

// Note the ids of an event. True where `kept` is the event without them.
bool Tokens::take_ids(std::string_view text, std::string& kept) {
    std::size_t copied = 0;
    const bool knows_prompt = !prompt.empty();
    for (std::size_t at = text.find(kKey); at != kNone; at = text.find(kKey, at)) {
        const bool of_prompt = at >= kPrompt.size() && text.substr(at - kPrompt.size(), kPrompt.size()) == kPrompt;
        std::size_t begin = at - (of_prompt ? kPrompt.size() : 0);
        at += kKey.size();
        if (begin < 2 || text[begin - 1] != '"' || (text[begin - 2] != ',' && text[begin - 2] != '{')) continue;
        std::size_t end = skip_spaces(text, at);
        if (end >= text.size() || text[end] != ':') continue;
        std::vector<std::uint32_t> ids;
        end = read_ids(text, skip_spaces(text, end + 1), ids);
        if (end == kNone) {
            odd = true;  // not what was asked for: nobody goes on from here
            continue;
        }
        if (answer.size() + ids.size() > kIdsMax) {
            odd = true;
        } else if (!of_prompt) {
            answer.insert(answer.end(), ids.begin(), ids.end());
        } else if (!knows_prompt) {
            prompt.swap(ids);
        }
        at = end;
        if (!hide_) continue;
        begin -= 1;
        if (text[begin - 1] == ',') {
            begin -= 1;
        } else if (end < text.size() && text[end] == ',') {
            end += 1;
        }
        kept.append(text.substr(copied, begin - copied));
        copied = end;
    }
    if (copied == 0) return false;
    kept.append(text.substr(copied));
    return true;
}

}  // namespace blockcast

// Owns what of a prompt came from the messages, and the JSON of a prompt's parts.
#include "lcs_chat.hpp"

#include <algorithm>
#include <optional>

namespace lcs {

namespace {

using chat_guard::rendered;
using chat_guard::stretch;

struct alignment {
    size_t prefix = 0;
    size_t suffix = 0;
};

alignment align(const std::string & a, const std::string & b) {
    alignment    common;
    const size_t n = std::min(a.size(), b.size());
    while (common.prefix < n && a[common.prefix] == b[common.prefix]) {
        ++common.prefix;
    }
    while (common.suffix < n - common.prefix && a[a.size() - 1 - common.suffix] == b[b.size() - 1 - common.suffix]) {
        ++common.suffix;
    }
    return common;
}

std::vector<bool> mask_of(const rendered & render) {
    std::vector<bool> mask;
    mask.reserve(render.text.size());
    for (const stretch & part : render.stretches) {
        mask.resize(part.end, part.is_input);
    }
    return mask;
}

std::vector<stretch> stretches_of(const std::vector<bool> & mask) {
    std::vector<stretch> parts;
    for (size_t i = 0; i < mask.size(); ++i) {
        if (parts.empty() || parts.back().is_input != mask[i]) {
            parts.push_back({i, mask[i]});
        }
        parts.back().end = i + 1;
    }
    return parts;
}

// Bytes of a prompt that is none of the renders. BOS and EOS may be cut off its ends, and a handler may have replaced
// or added a few bytes of template text.
std::vector<bool> input_mask(const std::string & prompt, const std::vector<rendered> & renders,
                             const std::function<std::vector<std::string>()> & texts) {
    const rendered * best = nullptr;
    alignment        how;
    for (const rendered & render : renders) {
        const bool cut_left = render.text.size() > prompt.size() &&
                              render.text.compare(render.text.size() - prompt.size(), prompt.size(), prompt) == 0;
        const alignment now = cut_left ? alignment{0, prompt.size()} : align(prompt, render.text);
        if (best == nullptr || now.prefix + now.suffix > how.prefix + how.suffix) {
            best = &render;
            how = now;
        }
    }
    std::vector<bool> mask(prompt.size(), false);
    if (best != nullptr && 2 * (how.prefix + how.suffix) >= prompt.size()) {
        const size_t            n = best->text.size();
        const std::vector<bool> is_input = mask_of(*best);
        std::copy_n(is_input.begin(), how.prefix, mask.begin());
        std::copy_n(is_input.begin() + static_cast<ptrdiff_t>(n - how.suffix), how.suffix,
                    mask.begin() + static_cast<ptrdiff_t>(prompt.size() - how.suffix));
        // What stands where input stood is input, and so is what lies between two bytes of it.
        bool input = how.prefix > 0 && how.suffix > 0 && is_input[how.prefix - 1] && is_input[n - how.suffix];
        for (size_t i = how.prefix; i < n - how.suffix; ++i) {
            input = input || is_input[i];
        }
        std::fill(mask.begin() + static_cast<ptrdiff_t>(how.prefix),
                  mask.begin() + static_cast<ptrdiff_t>(prompt.size() - how.suffix), input);
        return mask;
    }
    for (const std::string & text : texts()) {
        for (size_t at = text.size() < 3 ? std::string::npos : prompt.find(text); at != std::string::npos;
             at = prompt.find(text, at + text.size())) {
            std::fill_n(mask.begin() + static_cast<ptrdiff_t>(at), text.size(), true);
        }
    }
    return mask;
}

// llama.cpp takes BOS off the begin of a prompt and EOS off its end by their text alone. Where a message wrote that, it
// is the message's: the render as it was, less what the template itself wrote there.
std::optional<rendered> uncut(const std::string & prompt, const std::vector<rendered> & renders) {
    const rendered * best = nullptr; // the render that the prompt was: nothing else is as near
    for (const rendered & render : renders) {
        const bool holds = render.text.find(prompt) != std::string::npos;
        if (holds && (best == nullptr || render.text.size() < best->text.size())) {
            best = &render;
        }
    }
    if (best == nullptr) {
        return std::nullopt;
    }
    const std::vector<bool> mask = mask_of(*best);
    const auto              is_input = [&](size_t begin, size_t end) {
        const auto first = mask.begin();
        return begin < end && std::all_of(first + static_cast<ptrdiff_t>(begin), first + static_cast<ptrdiff_t>(end),
                                          [](bool input) { return input; });
    };
    const size_t at = best->text.find(prompt);
    const size_t stop = at + prompt.size();
    const size_t begin = is_input(0, at) ? 0 : at;
    const size_t end = is_input(stop, mask.size()) ? mask.size() : stop;
    if (begin == at && end == stop) {
        return std::nullopt;
    }
    const std::vector<bool> kept(mask.begin() + static_cast<ptrdiff_t>(begin),
                                 mask.begin() + static_cast<ptrdiff_t>(end));
    return rendered{best->text.substr(begin, end - begin), stretches_of(kept)};
}

// A template can cut characters. A character is input if any byte of it is.
void make_valid(std::string & prompt, std::vector<stretch> & parts) {
    const auto starts_character = [&](size_t at) {
        return at == prompt.size() || (static_cast<unsigned char>(prompt[at]) & 0xC0) != 0x80;
    };
    if (is_utf8(prompt.data(), prompt.size()) &&
        std::all_of(parts.begin(), parts.end(), [&](const stretch & part) { return starts_character(part.end); })) {
        return;
    }
    const std::vector<bool> mask = mask_of({prompt, parts});
    std::string             valid;
    std::vector<bool>       valid_mask;
    for (size_t i = 0; i < prompt.size();) {
        const auto   c = static_cast<unsigned char>(prompt[i]);
        const size_t n_wanted = std::min<size_t>(c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4, prompt.size() - i);
        const bool   whole = is_utf8(&prompt[i], n_wanted);
        const size_t n = whole ? n_wanted : 1;
        bool         is_input = false;
        for (size_t k = i; k < i + n; ++k) {
            is_input = is_input || mask[k];
        }
        whole ? valid.append(prompt, i, n) : valid.append("\xEF\xBF\xBD");
        valid_mask.resize(valid.size(), is_input);
        i += n;
    }
    prompt = std::move(valid);
    parts = stretches_of(valid_mask);
}

// As llama-common's JSON writes a text that is UTF-8.
void write_inside_quotes(std::string & json, const char * text, size_t n_bytes) {
    size_t done = 0;
    for (size_t i = 0; i < n_bytes; ++i) {
        const auto c = static_cast<unsigned char>(text[i]);
        if (c >= 0x20 && c != '"' && c != '\\') {
            continue;
        }
        json.append(text + done, i - done);
        done = i + 1;
        switch (c) {
            case '"':  json += "\\\""; break;
            case '\\': json += "\\\\"; break;
            case '\b': json += "\\b"; break;
            case '\f': json += "\\f"; break;
            case '\n': json += "\\n"; break;
            case '\r': json += "\\r"; break;
            case '\t': json += "\\t"; break;
            default:
                json += c < 0x10 ? "\\u000" : "\\u001";
                json += "0123456789abcdef"[c & 15];
        }
    }
    json.append(text + done, n_bytes - done);
}

} // namespace

std::string write_prompt(const std::string & prompt, const std::vector<rendered> & renders,
                         const std::function<std::vector<std::string>()> & texts) {
    const auto same = std::find_if(renders.begin(), renders.end(),
                                   [&](const rendered & render) { return render.text == prompt; });
    std::string          text = prompt;
    std::vector<stretch> parts;
    if (same != renders.end()) {
        parts = same->stretches;
    } else if (std::optional<rendered> whole = uncut(prompt, renders)) {
        text = std::move(whole->text);
        parts = std::move(whole->stretches);
    } else {
        parts = stretches_of(input_mask(prompt, renders, texts));
    }
    make_valid(text, parts);

    std::string json = "{\"text\":\"";
    std::string list;
    json.reserve(2 * text.size() + text.size() / 4);
    list.reserve(text.size() + text.size() / 8);
    size_t begin = 0;
    for (const stretch & part : parts) {
        list += begin == 0 ? "[\"" : ",[\"";
        const size_t at = list.size();
        write_inside_quotes(list, text.data() + begin, part.end - begin);
        json.append(list, at);
        list += part.is_input ? "\",true]" : "\",false]";
        begin = part.end;
    }
    return json + "\",\"parts\":[" + list + "]";
}

} // namespace lcs

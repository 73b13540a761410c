#include "match.hpp"

#include <map>
#include <optional>

#include "walk.hpp"

namespace blockcast {

namespace {

std::vector<u32> lengths_in_use(const ModelHolders& model) {
    std::vector<u32> lengths;
    for (const auto& [length, users] : model.lengths) lengths.push_back(length);
    for (const auto& [holder, pins] : model.pins) lengths.push_back(holder->cut());
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
}

}  // namespace

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const Promises& boundaries, const Promises& checkpoints) {
    const std::vector<u32> lengths = lengths_in_use(model);
    if (query.count < 2 || lengths.empty()) return {};
    u64 unit = 0;
    for (u32 length : lengths) unit = std::gcd(unit, u64{length});
    Prefixes prefixes(query, digester, unit);
    const Context context{query, model, nodes, seats, boundaries, checkpoints, lengths, unit, query.count - 1, prefixes};
    std::map<u32, std::vector<const Holder*>> alike;
    std::vector<const Holder*> others;
    for (const Holder* holder : model.holders) {
        const std::optional<u32> length = planes_length(context, *holder);
        if (length) {
            alike[*length].push_back(holder);
        } else if (holder->entries() != 0 || model.pins.count(holder) != 0) {
            others.push_back(holder);
        }
    }
    std::vector<Match> matches;
    for (const auto& [length, holders] : alike) {
        const std::vector<Match> found = match_planes(context, length, holders);
        matches.insert(matches.end(), found.begin(), found.end());
    }
    AnyMatcher any(context);
    for (const Holder* holder : others) {
        const Match match = any.match(*holder);
        if (match.tokens != 0 || match.pinned_tokens != 0) matches.push_back(match);
    }
    if (alike.size() + others.size() > 1) {
        std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) { return a.holder < b.holder; });
    }
    return matches;
}

}  // namespace blockcast

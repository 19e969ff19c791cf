// The rows of a step that simply go on, planned and taken in for all rows in one call each: what the scheduler and the engine do row
// by row in Python, for rows that need nothing else. Other rows are left to Python; tests/oracles/step.py is the same in readable Python.
#include <algorithm>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/attribute.h"

namespace paceline {
namespace {

struct StepNames {
    Attribute row{"row"}, request_id{"request_id"}, num_known{"num_known"}, max_drafts{"max_drafts"}, samples{"samples"},
        max_len{"max_len"}, num_kept_pages{"num_kept_pages"}, new_pages{"new_pages"}, decodes{"decodes"}, chunk_end{"chunk_end"},
        request{"request"}, token_ids{"token_ids"}, num_drafts{"num_drafts"}, group{"group"}, pages{"pages"}, num_sent_pages{"num_sent_pages"},
        decoding{"decoding"}, computed_len{"computed_len"}, in_flight{"in_flight"}, in_flight_tokens{"in_flight_tokens"},
        waits{"waits"}, ended{"ended"}, answer_end{"answer_end"}, checker{"checker"}, num_tokens{"num_tokens"},
        most_tokens{"most_tokens"}, num_accepted{"num_accepted"}, decode_passes{"decode_passes"}, decoded_tokens{"decoded_tokens"},
        unread{"_unread"}, ending_ids{"_ending_ids"}, logprobs{"logprobs"}, prompt_logprobs{"prompt_logprobs"}, text{"_text"},
        detokenizer{"_detokenizer"}, pieces{"_pieces"}, held_bytes{"_held_bytes"}, at_start{"_at_start"},
        started{"started"}, told_passes{"told_passes"}, drafted_tokens{"drafted_tokens"}, told_drafts{"told_drafts"},
        mismatches{"mismatches"}, count_pass{"count_pass"}, spent{"spent"};
};

const StepNames& names() {
    static const StepNames* all = new StepNames;  // as long as the interpreter
    return *all;
}

// A count or an index of an object.
int64_t number(nb::handle of, const Attribute& name) {
    const auto found = nb::cast<int64_t>(name.get(of));
    require(within(0, found, kMaxIds), "a number of a row is out of range");
    return found;
}

bool truth(nb::handle of, const Attribute& name) { return name.get(of).is(nb::handle(Py_True)); }

int64_t length(nb::handle of, const Attribute& name) { return static_cast<int64_t>(nb::len(name.get(of))); }

void put(nb::handle to, const Attribute& name, int64_t value) {
    name.set(to, nb::int_(value));
}

void put(nb::handle to, const Attribute& name, nb::handle value) { name.set(to, value); }

int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// A row that decodes next, as `Scheduler.decoding` has it.
struct Going {
    nb::object state;
    int64_t upper_len, drafts, num_pages, more_pages;
};

std::vector<Going> going_on(const nb::list& running, const nb::object& group, const nb::dict& ks) {
    const StepNames& name = names();
    std::vector<Going> found;
    for (nb::handle state : running) {
        if (!truth(state, name.decoding) || truth(state, name.ended)) continue;
        const int64_t in_flight = number(state, name.in_flight), more = number(state, name.in_flight_tokens);
        if (in_flight && truth(state, name.waits)) continue;
        if (!group.is_none() && !name.group.get(state).equal(group)) continue;
        const int64_t known = length(state, name.token_ids), left = number(state, name.answer_end) - known - std::min(in_flight, more);
        if (left <= 0) continue;
        int64_t drafts = 0;
        if (nb::len(ks)) {
            const nb::object row = name.row.get(state);
            if (ks.contains(row)) drafts = std::max<int64_t>(0, std::min(nb::cast<int64_t>(ks[row]), left - 1));
        }
        const int64_t num_pages = length(state, name.pages), need = pages_for(known + more + drafts) - num_pages;
        found.push_back({nb::borrow(state), known + more, drafts, num_pages, std::max<int64_t>(0, need)});
    }
    return found;
}

nb::object batch_row(const Going& one, const nb::type_object& type, const nb::tuple& nothing) {
    const StepNames& name = names();
    auto* made = reinterpret_cast<PyTypeObject*>(type.ptr());
    require(made->tp_new, "nothing can be made of this type");
    const nb::object row = nb::steal(made->tp_new(made, nothing.ptr(), nullptr));
    if (!row.is_valid()) throw nb::python_error();
    const nb::handle state = one.state;
    const int64_t sent = number(state, name.num_sent_pages), held = one.num_pages + one.more_pages;
    put(row, name.row, name.row.get(state));
    put(row, name.request_id, name.request_id.get(name.request.get(state)));
    put(row, name.num_known, 1);
    put(row, name.max_drafts, one.drafts);
    put(row, name.samples, nb::handle(Py_True));
    put(row, name.max_len, one.upper_len + one.drafts + 1);
    put(row, name.num_kept_pages, sent);
    const nb::object pages = name.pages.get(state);
    put(row, name.new_pages, sent < held ? nb::steal(PySequence_Tuple(nb::steal(PySequence_GetSlice(pages.ptr(), sent, held)).ptr())) : nb::object(nothing));
    put(row, name.decodes, nb::handle(Py_True));
    put(row, name.chunk_end, 0);
    put(state, name.in_flight, number(state, name.in_flight) + 1);
    put(state, name.in_flight_tokens, number(state, name.in_flight_tokens) + one.drafts + 1);
    put(state, name.num_drafts, one.drafts);
    if (sent != held) put(state, name.num_sent_pages, held);
    return row;
}

// Schedule all rows that decode, each with at most `ks[row]` drafts; None, and nothing is done, if `free` pages do not suffice.
// take(count): hands out pages. type: class of a row of the batch.
nb::object decode_rows(const nb::list& running, const nb::object& group, const nb::dict& ks, int64_t free, const nb::callable& take,
                       const nb::type_object& type) {
    const std::vector<Going> all = going_on(running, group, ks);
    int64_t needed = 0;
    for (const Going& one : all) needed += one.more_pages;
    if (needed > free) return nb::none();
    nb::list taken;
    if (needed) taken = nb::cast<nb::list>(take(needed));
    const nb::tuple nothing;
    nb::list rows;
    Py_ssize_t done = 0;
    for (const Going& one : all) {
        if (one.more_pages) {
            const auto own = nb::cast<nb::list>(names().pages.get(one.state));
            const nb::object more = nb::steal(PyList_GetSlice(taken.ptr(), done, done + one.more_pages));
            if (PyList_SetSlice(own.ptr(), one.num_pages, one.num_pages, more.ptr())) throw nb::python_error();
            done += one.more_pages;
        }
        rows.append(batch_row(one, type, nothing));
    }
    return rows;
}

// True if an answer takes these tokens unread: none of them can end it, and they are not its first ones, which are told at once.
bool only_grows(nb::handle checker, const nb::object& tokens, int64_t written, int64_t count) {
    const StepNames& name = names();
    if (!count || !written || written + count >= number(checker, name.most_tokens) || length(checker, name.unread)) return false;
    const nb::object ending = name.ending_ids.get(checker);
    for (nb::handle token : tokens)
        if (const int ends = PySequence_Contains(ending.ptr(), token.ptr())) return ends < 0 ? throw nb::python_error() : false;
    return true;
}

// Add to a counter of an object.
void add(nb::handle to, const Attribute& name, int64_t more) { put(to, name, number(to, name) + more); }

// What `take_in` leaves to Python.
struct Left {
    nb::list rows, filled, spare;  // indices of rows; (state, first page, end) of pages that filled; states with more pages than they need
    nb::list drafted;              // indices of rows that were taken in, and whose drafts are still to be counted for all rows together
    int64_t passes = 0, tokens = 0;
};

void reveal(nb::handle r, nb::handle state, const nb::object& tokens, int64_t count, Left& left) {
    const StepNames& name = names();
    const int64_t in_flight = number(state, name.in_flight) - 1, computed = number(state, name.computed_len), now = computed + count;
    put(state, name.in_flight, in_flight);
    put(state, name.in_flight_tokens, number(state, name.in_flight_tokens) - number(r, name.max_drafts) - 1);
    const auto known = nb::cast<nb::list>(name.token_ids.get(state));
    const auto end = static_cast<Py_ssize_t>(nb::len(known));
    if (PyList_SetSlice(known.ptr(), end, end, tokens.ptr())) throw nb::python_error();
    put(state, name.computed_len, now);
    if (now / kPageTokens > computed / kPageTokens) left.filled.append(nb::make_tuple(state, computed / kPageTokens, now / kPageTokens));
    if (!in_flight && pages_for(end + count) < length(state, name.pages)) left.spare.append(state);
}

// Take in the outcomes of rows that decoded and whose answers only grow; see `Verbs.commit`. drafts: what was verified of `proposed`.
// gains: `OutputQueue.gains`. Returns (rows left to Python, pages that filled, states with spare pages, passes without drafts, tokens,
// rows taken in that had drafts).
nb::tuple take_in(const nb::tuple& rows, const nb::tuple& proposed, const nb::tuple& drafts, const nb::tuple& verdicts, nb::handle no_draft,
                  const nb::dict& states, const nb::dict& responses, nb::list gains) {
    const StepNames& name = names();
    const size_t n = nb::len(rows);
    require(nb::len(proposed) == n && nb::len(drafts) == n && nb::len(verdicts) == n, "every row has drafts and a verdict");
    Left left;
    for (size_t i = 0; i < n; ++i) {
        const nb::handle r = rows[i], draft = proposed[i], verdict = verdicts[i];
        const nb::object id = name.request_id.get(r), tokens = name.token_ids.get(verdict);
        const nb::handle response = PyDict_GetItemWithError(responses.ptr(), id.ptr()), state = PyDict_GetItemWithError(states.ptr(), id.ptr());
        if (PyErr_Occurred()) throw nb::python_error();
        const auto count = static_cast<int64_t>(nb::len(tokens));
        if (response.is_valid() && state.is_valid() && truth(r, name.decodes) && name.mismatches.get(verdict).is_none()) {
            const nb::object checker = name.checker.get(response);
            const int64_t written = number(checker, name.num_tokens);
            if (only_grows(checker, tokens, written, count)) {
                put(checker, name.unread, tokens);
                put(checker, name.num_tokens, written + count);
                if (draft.is(no_draft)) {
                    add(response, name.decode_passes, 1);
                    add(response, name.decoded_tokens, count);
                    ++left.passes;
                } else {
                    name.count_pass.get(response)(draft, drafts[i], name.num_accepted.get(verdict), count);
                    left.drafted.append(i);
                }
                reveal(r, state, tokens, count, left);
                gains.append(nb::make_tuple(response, tokens, verdict));
                left.tokens += count;
                continue;
            }
        }
        left.rows.append(i);
    }
    return nb::make_tuple(left.rows, left.filled, left.spare, left.passes, left.tokens, left.drafted);
}

// The text of tokens, as `Detokenizer.push` makes it. Nothing if bytes are held back before or behind them, or if it fails: Python raises.
nb::object text_of(nb::handle detokenizer, const nb::object& tokens) {
    const StepNames& name = names();
    if (length(detokenizer, name.held_bytes) || !name.at_start.get(detokenizer).is(nb::handle(Py_False))) return {};
    const nb::object pieces = name.pieces.get(detokenizer);
    std::string data;
    for (nb::handle token : tokens) {
        const nb::object piece = nb::steal(PyObject_GetItem(pieces.ptr(), token.ptr()));  // this may call Python, which looks the bytes up
        if (!piece.is_valid()) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // such as Ctrl-C
            PyErr_Clear();
            return {};
        }
        const auto bytes = nb::cast<nb::bytes>(piece);
        data.append(bytes.c_str(), bytes.size());
    }
    Py_ssize_t num_read = 0;
    nb::object text = nb::steal(PyUnicode_DecodeUTF8Stateful(data.data(), static_cast<Py_ssize_t>(data.size()), "replace", &num_read));
    if (!text.is_valid()) throw nb::python_error();
    return static_cast<size_t>(num_read) == data.size() ? text : nb::object();
}

// What a response cost, to be told with any outcome but its first: nothing where a count of its tokens tells it, see `Response.spent`.
nb::object spent(nb::handle response, int64_t count) {
    const StepNames& name = names();
    const bool told_by_tokens = number(response, name.decode_passes) == number(response, name.told_passes) + count &&
                                number(response, name.drafted_tokens) == number(response, name.told_drafts);
    if (!told_by_tokens) return name.spent.get(response)(count);
    add(response, name.told_passes, count);
    return nb::none();
}

// Make the outcomes of gains that bring text and nothing else; see `OutputQueue.flush`. Returns the gains left to Python.
nb::list make_outcomes(const nb::list& gains, nb::list outcomes, const nb::type_object& type) {
    const StepNames& name = names();
    nb::list left;
    for (size_t i = 0; i < nb::len(gains); ++i) {
        const nb::object gain = gains[i], response = gain[0], checker = name.checker.get(response), unread = name.unread.get(checker);
        const nb::tuple tokens{nb::object(gain[1])};
        const auto count = static_cast<int64_t>(nb::len(tokens));
        const bool scored = !name.prompt_logprobs.get(response).is_none() || !name.logprobs.get(gain[2]).is_none();
        const bool plain = !scored && nb::len(unread) && !length(checker, name.text) && truth(response, name.started);
        const nb::object text = plain ? text_of(name.detokenizer.get(checker), unread) : nb::object();
        if (!text.is_valid()) {
            left.append(gain);
            continue;
        }
        const int64_t start = number(checker, name.num_tokens) - count;
        outcomes.append(type(name.request_id.get(response), tokens, text, "start"_a = start, "spent"_a = spent(response, count)));
        put(checker, name.unread, nb::tuple());
    }
    return left;
}

// What a device is told of a step's rows, [4, n], and the length that the longest may reach: see `DeviceRows.step_block`.
nb::tuple step_block(const nb::tuple& rows, const nb::list& num_drafts) {
    const StepNames& name = names();
    const size_t n = nb::len(rows);
    require(nb::len(num_drafts) == n, "every row has a number of drafts");
    auto block = new_array<int64_t>(4 * n);
    int64_t longest = 0;
    for (size_t i = 0; i < n; ++i) {
        const nb::handle r = rows[i];
        block[i] = number(r, name.row), block[n + i] = number(r, name.num_known);
        block[2 * n + i] = nb::cast<int64_t>(num_drafts[i]), block[3 * n + i] = truth(r, name.samples);
        longest = std::max(longest, number(r, name.max_len));
    }
    return nb::make_tuple(returned(std::move(block), size_t{4}, n), longest);
}

// Append to rows what verdicts say they gained: see `Rows.commit`.
void append_gains(const OutTable<int64_t>& token_ids, const OutArray<int64_t>& lengths, const OutArray<int64_t>& computed,
                  const nb::tuple& rows, const nb::tuple& verdicts) {
    const StepNames& name = names();
    const size_t num_rows = token_ids.shape(0);
    require(lengths.size() == num_rows && computed.size() == num_rows, "every row has a length");
    require(nb::len(rows) == nb::len(verdicts), "every row has a verdict");
    for (size_t i = 0; i < nb::len(rows); ++i) {
        const nb::handle r = rows[i], verdict = verdicts[i];
        const int64_t row = number(r, name.row), known = number(r, name.num_known);
        const nb::object tokens = name.token_ids.get(verdict);
        const auto count = static_cast<int64_t>(nb::len(tokens));
        require(0 <= row && static_cast<size_t>(row) < num_rows, "no such row");
        int64_t& end = lengths.data()[row];
        require(within(end, count, token_ids.shape(1)), "a row has no room for its new tokens");
        require(within(computed.data()[row], known, kMaxIds), "more tokens are known than a row can have");
        int64_t* to = token_ids.data() + row * token_ids.shape(1) + end;
        for (int64_t k = 0; k < count; ++k) to[k] = nb::cast<int64_t>(tokens[k]);
        end += count;
        computed.data()[row] += known + std::max<int64_t>(0, count - 1);
    }
}

}  // namespace

void bind_step(nb::module_& m) {
    m.def("decode_rows", &decode_rows, "running"_a, "group"_a.none(), "ks"_a, "free"_a, "take"_a, "row_type"_a);
    m.def("take_in", &take_in, "rows"_a, "proposed"_a, "drafts"_a, "verdicts"_a, "no_draft"_a, "states"_a, "responses"_a, "gains"_a);
    m.def("make_outcomes", &make_outcomes, "gains"_a, "outcomes"_a, "outcome_type"_a);
    m.def("step_block", &step_block, "rows"_a, "num_drafts"_a);
    m.def("append_gains", &append_gains, "token_ids"_a.noconvert(), "length"_a.noconvert(), "computed"_a.noconvert(), "rows"_a, "verdicts"_a);
}

}  // namespace paceline

package data

import (
	"bytes"
	"container/heap"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Tokenizer cuts text into the tokens of a vocabulary, by byte-level byte pair encoding as GPT-2 and its successors have it (R. Sennrich
// and others, "Neural machine translation of rare words with subword units", 2016). Any goroutine may use it at any time.
type Tokenizer struct {
	path, sum string
	pieces    map[string]int32  // of the vocabulary, as bytes
	bytes     map[int32]string  // the bytes of each token
	ranks     map[[2]int32]rank // of merges
	single    [256]int32        // the tokens of single bytes
	whole     bool              // a word that is a token is not built by merges
	space     bool              // text begins with a space
	words     []*splitter
	added     *regexp.Regexp   // tokens that are found in the text first; nil: none
	names     map[string]int32 // of those
	size      int

	mu    sync.Mutex
	known map[string][]int32 // words that came before
}

// rank orders merges.
type rank struct{ order, into int32 }

// Bounds of what is read and kept.
const (
	maxTokenizer = 128 << 20 // bytes of a tokenizer.json
	maxKnown     = 1 << 16   // words
	maxKnownWord = 32        // bytes of one
)

// ReadTokenizer reads a tokenizer.json of Hugging Face's tokenizers with a BPE model over bytes, such as those of GPT-2, Llama 3 and
// Qwen. Text is encoded as there, but without the tokens that a post-processor adds. What the file asks for beyond that is an error,
// of type [*trainer.DataError].
func ReadTokenizer(path string) (*Tokenizer, error) {
	fail := func(reason string) (*Tokenizer, error) { return nil, &trainer.DataError{Path: path, Reason: reason} }
	files, err := find.List([]string{path})
	if err != nil {
		return nil, err
	}
	f, err := os.Open(files[0].At())
	if err != nil {
		return fail(find.Cause(err))
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTokenizer+1))
	switch {
	case err != nil:
		return fail(find.Cause(err))
	case len(text) > maxTokenizer:
		return fail(fmt.Sprintf("is longer than %d bytes", maxTokenizer))
	}
	t, err := parseTokenizer(text)
	if err != nil {
		return fail(err.Error())
	}
	sum := sha256.Sum256(text)
	t.path, t.sum = path, hex.EncodeToString(sum[:])
	return t, nil
}

// tokenizerFile is a tokenizer.json.
type tokenizerFile struct {
	Added []struct {
		ID             int32
		Content        string
		SingleWord     bool `json:"single_word"`
		LStrip, RStrip bool
	} `json:"added_tokens"`
	Normalizer   json.RawMessage
	PreTokenizer *preTokenizer `json:"pre_tokenizer"`
	Model        struct {
		Type         string
		Dropout      *float64
		Prefix       *string `json:"continuing_subword_prefix"`
		Suffix       *string `json:"end_of_word_suffix"`
		ByteFallback bool    `json:"byte_fallback"`
		IgnoreMerges bool    `json:"ignore_merges"`
		Vocab        map[string]int32
		Merges       []merge
	}
}

type preTokenizer struct {
	Type           string
	AddPrefixSpace bool  `json:"add_prefix_space"`
	UseRegex       *bool `json:"use_regex"`
	Pattern        struct{ Regex, String string }
	Behavior       string
	Invert         bool
	Individual     bool            `json:"individual_digits"`
	PreTokenizers  []*preTokenizer `json:"pretokenizers"`
}

// merge is a pair of tokens, which files write as two strings or as one with a space.
type merge [2]string

func (m *merge) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		first, second, ok := strings.Cut(one, " ")
		if !ok {
			return fmt.Errorf("merge %q is no pair", one)
		}
		*m = merge{first, second}
		return nil
	}
	var two []string
	if err := json.Unmarshal(b, &two); err != nil || len(two) != 2 {
		return fmt.Errorf("merge %.50s is no pair", b)
	}
	*m = merge{two[0], two[1]}
	return nil
}

// gpt2Words is the pattern of a byte-level pre-tokenizer.
const gpt2Words = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

func parseTokenizer(text []byte) (*Tokenizer, error) {
	var f tokenizerFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("is no tokenizer.json: %w", err)
	}
	m := &f.Model
	empty := func(s *string) bool { return s == nil || *s == "" }
	switch {
	case m.Type != "BPE" && m.Type != "" || len(m.Vocab) == 0:
		return nil, fmt.Errorf("has a model of type %q; BPE is supported", m.Type)
	case m.Dropout != nil && *m.Dropout != 0, !empty(m.Prefix), !empty(m.Suffix), m.ByteFallback:
		return nil, fmt.Errorf("has a model with dropout, a subword prefix, a word suffix or byte fallback; plain BPE over bytes is supported")
	case f.Normalizer != nil && !bytes.Equal(f.Normalizer, []byte("null")):
		return nil, fmt.Errorf("has the normalizer %.60s; none is supported", f.Normalizer)
	}
	t := &Tokenizer{
		pieces: make(map[string]int32, len(m.Vocab)), bytes: make(map[int32]string, len(m.Vocab)), ranks: make(map[[2]int32]rank, len(m.Merges)),
		whole: m.IgnoreMerges, names: make(map[string]int32), known: make(map[string][]int32),
	}
	add := func(id int32, text string) error {
		if was, ok := t.bytes[id]; id < 0 || id == math.MaxInt32 || ok && was != text {
			return fmt.Errorf("has the ID %d for %q, and for %q", id, text, was)
		}
		t.bytes[id] = text
		t.size = max(t.size, int(id)+1)
		return nil
	}
	for _, a := range f.Added {
		if a.Content == "" || a.SingleWord || a.LStrip || a.RStrip {
			return nil, fmt.Errorf("has the added token %q, which is empty or takes in what is beside it; neither is supported", a.Content)
		}
		t.names[a.Content] = a.ID
		if err := add(a.ID, a.Content); err != nil {
			return nil, err
		}
	}
	for text, id := range m.Vocab {
		if named, ok := t.names[text]; ok && named == id {
			continue
		}
		raw, ok := fromLetters(text)
		if !ok {
			return nil, fmt.Errorf("has the token %q, which does not stand for bytes; byte-level vocabularies are supported", text)
		}
		if err := add(id, raw); err != nil {
			return nil, err
		}
		t.pieces[raw] = id
	}
	for b := range t.single {
		id, ok := t.pieces[string([]byte{byte(b)})]
		if !ok {
			return nil, fmt.Errorf("has no token for byte %d; byte-level vocabularies are supported", b)
		}
		t.single[b] = id
	}
	for i, pair := range m.Merges {
		first, ok1 := fromLetters(pair[0])
		second, ok2 := fromLetters(pair[1])
		a, ok3 := t.pieces[first]
		b, ok4 := t.pieces[second]
		into, ok5 := t.pieces[first+second]
		if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
			return nil, fmt.Errorf("has the merge %q, which is not of tokens", pair)
		}
		if _, twice := t.ranks[[2]int32{a, b}]; !twice {
			t.ranks[[2]int32{a, b}] = rank{int32(i), into}
		}
	}
	if err := t.readWords(f.PreTokenizer); err != nil {
		return nil, err
	}
	return t, t.readAdded()
}

// readAdded makes the pattern of added tokens: of several at one place, the longest.
func (t *Tokenizer) readAdded() (err error) {
	if len(t.names) == 0 {
		return nil
	}
	var quoted []string
	for name := range t.names {
		quoted = append(quoted, regexp.QuoteMeta(name))
	}
	if t.added, err = regexp.Compile(strings.Join(quoted, "|")); err != nil {
		return fmt.Errorf("has added tokens that cannot be found: %w", err)
	}
	t.added.Longest()
	return nil
}

// readWords reads how text is cut into words.
func (t *Tokenizer) readWords(p *preTokenizer) error {
	if p == nil {
		return fmt.Errorf("has no pre-tokenizer; ByteLevel is supported, alone or after Split and Digits")
	}
	parts := []*preTokenizer{p}
	if p.Type == "Sequence" {
		parts = p.PreTokenizers
	}
	for i, p := range parts {
		pattern := ""
		switch {
		case p == nil:
		case p.Type == "ByteLevel" && i == len(parts)-1:
			if t.space = p.AddPrefixSpace; t.space && i > 0 {
				return fmt.Errorf("adds a space behind other pre-tokenizers, which is not supported")
			}
			if p.UseRegex != nil && !*p.UseRegex {
				return nil
			}
			pattern = gpt2Words
		case p.Type == "Digits" && p.Individual:
			pattern = `\p{Nd}`
		case p.Type == "Digits":
			pattern = `\p{Nd}+`
		case p.Type == "Split" && p.Behavior == "Isolated" && !p.Invert && p.Pattern.Regex != "":
			pattern = p.Pattern.Regex
		}
		if pattern == "" {
			return fmt.Errorf("has a pre-tokenizer that is not supported; ByteLevel is, alone or after Split (a pattern, Isolated) and Digits")
		}
		s, err := newSplitter(pattern)
		if err != nil {
			return err
		}
		if t.words = append(t.words, s); i == len(parts)-1 {
			if p.Type != "ByteLevel" {
				break
			}
			return nil
		}
	}
	return fmt.Errorf("has pre-tokenizers that do not end with ByteLevel, which is not supported")
}

// Tokens returns the size of the vocabulary: all tokens are below it.
func (t *Tokenizer) Tokens() int { return t.size }

// Token returns the number of a token by its name, such as "<|endoftext|>".
func (t *Tokenizer) Token(name string) (id int32, ok bool) {
	if id, ok = t.names[name]; !ok {
		id, ok = t.pieces[name]
	}
	return id, ok
}

// Decode returns the bytes of tokens, none for those that do not exist. Tokens may end within a character.
func (t *Tokenizer) Decode(tokens []int32) []byte {
	var b []byte
	for _, id := range tokens {
		b = append(b, t.bytes[id]...)
	}
	return b
}

// Encode appends the tokens of a text to dst. Bytes that are not UTF-8 count as U+FFFD.
func (t *Tokenizer) Encode(dst []int32, text string) []int32 {
	text = strings.ToValidUTF8(text, "\uFFFD")
	for text != "" {
		at, end := len(text), len(text)
		if t.added != nil {
			if found := t.added.FindStringIndex(text); found != nil {
				at, end = found[0], found[1]
			}
		}
		if plain := text[:at]; plain != "" {
			if t.space && plain[0] != ' ' {
				plain = " " + plain
			}
			dst = t.split(dst, plain, t.words)
		}
		if at < end {
			dst = append(dst, t.names[text[at:end]])
		}
		text = text[end:]
	}
	return dst
}

// split cuts text into words by one pattern after the other.
func (t *Tokenizer) split(dst []int32, text string, by []*splitter) []int32 {
	if len(by) == 0 {
		return t.word(dst, text)
	}
	for text != "" {
		at, end := by[0].next(text)
		if at > 0 {
			dst = t.split(dst, text[:at], by[1:])
		}
		if at < end {
			dst = t.split(dst, text[at:end], by[1:])
		}
		text = text[end:]
	}
	return dst
}

// word appends the tokens of a word.
func (t *Tokenizer) word(dst []int32, word string) []int32 {
	if len(word) > maxKnownWord {
		return t.merge(dst, word)
	}
	t.mu.Lock()
	known, ok := t.known[word]
	t.mu.Unlock()
	if !ok {
		known = t.merge(nil, word)
		t.mu.Lock()
		if len(t.known) == maxKnown {
			clear(t.known)
		}
		t.known[strings.Clone(word)] = known
		t.mu.Unlock()
	}
	return append(dst, known...)
}

// merge builds the tokens of a word: of all pairs side by side that are merges, the first in the list is merged, the leftmost of equal
// ones, until none is left.
func (t *Tokenizer) merge(dst []int32, word string) []int32 {
	if id, ok := t.pieces[word]; ok && t.whole {
		return append(dst, id)
	}
	type link struct{ before, after int32 }
	ids, links := make([]int32, len(word)), make([]link, len(word))
	for i := range len(word) {
		ids[i], links[i] = t.single[word[i]], link{int32(i) - 1, int32(i) + 1}
	}
	var queue pairs
	look := func(at int32) {
		if next := links[at].after; int(next) < len(word) {
			if r, ok := t.ranks[[2]int32{ids[at], ids[next]}]; ok {
				heap.Push(&queue, pairAt{r.order, at, ids[at], ids[next], r.into})
			}
		}
	}
	for i := range len(word) - 1 {
		look(int32(i))
	}
	for len(queue) > 0 {
		p := heap.Pop(&queue).(pairAt)
		next := links[p.at].after
		if ids[p.at] != p.first || int(next) >= len(word) || ids[next] != p.second {
			continue // one of them has been merged since
		}
		ids[p.at], ids[next] = p.into, -1
		links[p.at].after = links[next].after
		if after := links[p.at].after; int(after) < len(word) {
			links[after].before = p.at
		}
		look(p.at)
		if before := links[p.at].before; before >= 0 {
			look(before)
		}
	}
	for _, id := range ids {
		if id >= 0 {
			dst = append(dst, id)
		}
	}
	return dst
}

// pairAt is a pair of tokens that can be merged.
type pairAt struct{ order, at, first, second, into int32 }

type pairs []pairAt

func (p pairs) Len() int { return len(p) }
func (p pairs) Less(i, j int) bool {
	return p[i].order < p[j].order || p[i].order == p[j].order && p[i].at < p[j].at
}
func (p pairs) Swap(i, j int) { p[i], p[j] = p[j], p[i] }
func (p *pairs) Push(x any)   { *p = append(*p, x.(pairAt)) }
func (p *pairs) Pop() any {
	last := (*p)[len(*p)-1]
	*p = (*p)[:len(*p)-1]
	return last
}

// splitter finds words by a pattern.
type splitter struct {
	pattern *regexp.Regexp
	spaces  int // the group of a run of white space that leaves its last character to the word behind it; 0: none
}

// ahead is the part of patterns that package regexp lacks: white space, up to the last character of it before a word.
const ahead = `\s+(?!\S)|\s+`

func newSplitter(pattern string) (*splitter, error) {
	plain := pattern
	if before, ok := strings.CutSuffix(pattern, ahead); ok {
		plain = before + `(?P<spaces>\s+)`
	}
	compiled, err := regexp.Compile(unicodeSpaces(plain))
	if err != nil {
		return nil, fmt.Errorf("has a pre-tokenizer with the pattern %q, which is not supported: %w", pattern, err)
	}
	return &splitter{compiled, max(compiled.SubexpIndex("spaces"), 0)}, nil
}

// unicodeSpaces replaces \s, which means ASCII to package regexp, by all white space of Unicode.
func unicodeSpaces(pattern string) string {
	const spaces = `\t-\r\x{85}\p{Z}`
	var b strings.Builder
	class := false
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == '\\' && i+1 < len(pattern):
			i++
			switch e := pattern[i]; {
			case e == 's' && class:
				b.WriteString(spaces)
			case e == 's':
				b.WriteString("[" + spaces + "]")
			case e == 'S' && !class:
				b.WriteString("[^" + spaces + "]")
			default:
				b.WriteByte(c)
				b.WriteByte(e)
			}
			continue
		case c == '[':
			class = true
		case c == ']':
			class = false
		}
		b.WriteByte(pattern[i])
	}
	return b.String()
}

// next returns the first word in a text, and the end of the text if there is none.
func (s *splitter) next(text string) (at, end int) {
	if s.spaces == 0 {
		if found := s.pattern.FindStringIndex(text); found != nil && found[1] > found[0] {
			return found[0], found[1]
		}
		return len(text), len(text)
	}
	found := s.pattern.FindStringSubmatchIndex(text)
	if found == nil || found[1] == found[0] {
		return len(text), len(text)
	}
	at, end = found[0], found[1]
	if found[2*s.spaces] >= 0 && end < len(text) {
		if _, n := utf8.DecodeLastRuneInString(text[at:end]); n < end-at {
			end -= n
		}
	}
	return at, end
}

// letters are the printable characters that vocabularies write in place of bytes.
var lettersBack = func() map[rune]byte {
	back := make(map[rune]byte)
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if !(b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae) {
			r, next = next, next+1
		}
		back[r] = byte(b)
	}
	return back
}()

// fromLetters returns the bytes that a token of a vocabulary stands for.
func fromLetters(s string) (string, bool) {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		c, ok := lettersBack[r]
		if !ok {
			return "", false
		}
		b = append(b, c)
	}
	return string(b), len(b) > 0
}

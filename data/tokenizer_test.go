package data_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

func tokenizer(t testing.TB, name string) *data.Tokenizer {
	t.Helper()
	k, err := data.ReadTokenizer(filepath.Join("testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Text is encoded as @huggingface/tokenizers 0.2.0 encodes it (testdata/expected.json), with the words of GPT-2 and with those of Llama 3,
// and decoding gives it back.
func TestTokenizer(t *testing.T) {
	text, err := os.ReadFile("testdata/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Texts        []string
		GPT2, Llama3 [][]int32
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	for name, ids := range map[string][][]int32{"gpt2": want.GPT2, "llama3": want.Llama3} {
		k := tokenizer(t, name)
		for range 2 { // words that are known, too
			for i, text := range want.Texts {
				got := k.Encode(nil, text)
				if !slices.Equal(got, ids[i]) {
					t.Errorf("%s: %q is %v, want %v", name, text, got, ids[i])
				}
				if back := string(k.Decode(got)); back != text {
					t.Errorf("%s: %q decodes to %q", name, text, back)
				}
			}
		}
	}
	k := tokenizer(t, "gpt2")
	end, ok := k.Token("<|endoftext|>")
	if !ok || int(end) != k.Tokens()-1 {
		t.Error(end, ok, k.Tokens())
	}
	if _, ok := k.Token("<|none|>"); ok {
		t.Error("an unknown name is a token")
	}
	if got := string(k.Decode(k.Encode(nil, "a\xff b"))); got != "a\uFFFD b" {
		t.Errorf("%q", got)
	}
}

func TestTokenizerFaults(t *testing.T) {
	text, err := os.ReadFile("testdata/gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, new, want string }{
		{`{"version"`, `["version"`, "is no tokenizer.json"},
		{`"type": "BPE"`, `"type": "Unigram"`, `has a model of type "Unigram"; BPE is supported`},
		{`"dropout": null`, `"dropout": 0.1`, "has a model with dropout"},
		{`"normalizer": null`, `"normalizer": {"type": "NFC"}`, `has the normalizer {"type": "NFC"}; none is supported`},
		{`"pre_tokenizer": {"type": "ByteLevel"`, `"pre_tokenizer": {"type": "Whitespace"`, "has a pre-tokenizer that is not supported"},
		{`"lstrip": false`, `"lstrip": true`, `has the added token "<|endoftext|>", which`},
		{`"Ġ": 32`, `"Ġ": 33`, "has the ID 33 for "},
		{`"a": 97, `, ``, "has no token for byte 97"},
		{`"merges": ["`, `"merges": ["a zebra", "`, "has the merge "},
		{`"merges": ["`, `"merges": [["a"], "`, "is no pair"},
		{`"Ġ": 32`, `"日": 32`, "does not stand for bytes"},
	} {
		broken := strings.Replace(string(text), c.old, c.new, 1)
		if broken == string(text) {
			t.Errorf("%s is not in the file", c.old)
		}
		_, err := data.ReadTokenizer(write(t, filepath.Join(t.TempDir(), "tokenizer.json"), []byte(broken)))
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want a DataError with %q", c.new, err, c.want)
		}
	}
}

func FuzzTokenizer(f *testing.F) {
	for _, name := range []string{"gpt2", "llama3"} {
		text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, "  some text, it's\n\n12345")
	}
	f.Fuzz(func(t *testing.T, file []byte, text string) {
		k, err := data.ReadTokenizer(write(t, filepath.Join(t.TempDir(), "tokenizer.json"), file))
		if err != nil {
			if !errors.As(err, new(*trainer.DataError)) {
				t.Errorf("%T: %v", err, err)
			}
			return
		}
		ids := k.Encode(nil, text)
		if got, want := string(k.Decode(ids)), strings.ToValidUTF8(text, "\uFFFD"); strings.ReplaceAll(got, " ", "") != strings.ReplaceAll(want, " ", "") {
			t.Errorf("%q decodes to %q", want, got)
		}
	})
}

func BenchmarkTokenizer(b *testing.B) {
	k := tokenizer(b, "llama3")
	text, err := os.ReadFile("../docs/architecture.md")
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		k.Encode(nil, string(text))
	}
}

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

func parse(t *testing.T, args ...string) *options {
	t.Helper()
	o := new(options)
	f := flag.NewFlagSet("gpt", flag.ContinueOnError)
	o.register(f)
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return o
}

// corpus writes a text file and returns its path.
func corpus(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "corpus.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("the quick brown fox jumps over the lazy dog\n", 50)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func small(t *testing.T, args ...string) *options {
	t.Helper()
	return parse(t, append([]string{"--data", corpus(t), "--layers", "1", "--width", "32", "--heads", "2", "--context", "16"}, args...)...)
}

// train runs the job of o for some steps into dir and returns what it wrote.
func train(t *testing.T, o *options, dir string, steps int) (trainer.Summary, string) {
	t.Helper()
	job, err := o.job()
	if err != nil {
		t.Fatal(err)
	}
	job.RunDir, job.Steps = dir, steps
	var out bytes.Buffer
	onEnd := job.OnEnd
	job.OnEnd = func(end trainer.End) error {
		end.Out = &out
		return onEnd(end)
	}
	summary, err := trainer.Run(context.Background(), job)
	if err != nil {
		t.Fatal(err)
	}
	return summary, out.String()
}

func TestLearnsAndWrites(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	summary, text := train(t, small(t, "--sample", "the q", "--sample-bytes", "50"), dir, 30)
	if summary.ValLoss == nil || !(*summary.ValLoss < 4.5) {
		t.Errorf("val_loss %v, want it well below log 256 = 5.5", summary.ValLoss)
	}
	if !strings.HasPrefix(text, "the q") || len([]rune(text)) < 40 {
		t.Errorf("the sample is %q", text)
	}

	var again bytes.Buffer
	if err := parse(t, "--from", dir, "--sample", "the q", "--sample-bytes", "50").writeFrom(&again, alphabet{}); err != nil {
		t.Fatal(err)
	}
	if again.String() != text {
		t.Errorf("the saved model writes %q, the trained one wrote %q", again.String(), text)
	}
}

// Documents are trained on by their tokens, packed and not, and the tokens are trained on from a file of theirs.
func TestTokens(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir := t.TempDir()
	var lines, tokens []byte
	words, err := readAlphabet(tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		text := strings.Repeat("the quick brown fox ", 1+i%5)
		lines = fmt.Appendf(lines, "{\"text\": %q}\n", text)
		for _, token := range words.encode(text) {
			tokens = binary.LittleEndian.AppendUint16(tokens, uint16(token))
		}
	}
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	documents, bin := write("a.jsonl", lines), write("a.bin", tokens)
	for name, flags := range map[string][]string{
		"documents": {"--data", documents}, "packed": {"--data", documents, "--pack"}, "tokens": {"--data", bin, "--vocab", fmt.Sprint(words.size())},
		"text": {"--data", write("a.txt", lines)},
	} {
		t.Run(name, func(t *testing.T) {
			run := filepath.Join(t.TempDir(), "run")
			o := parse(t, append(flags, "--tokenizer", tokenizer, "--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--sample", "the q", "--sample-bytes", "9")...)
			summary, text := train(t, o, run, 2)
			if summary.ValLoss == nil || !strings.HasPrefix(text, "the q") {
				t.Errorf("val_loss %v, and the sample is %q", summary.ValLoss, text)
			}
			var again bytes.Buffer
			if err := parse(t, "--from", run, "--sample", "the q").writeFrom(&again, alphabet{}); err == nil || !strings.Contains(err.Error(), "give their --tokenizer") {
				t.Errorf("without the tokenizer: %v", err)
			}
		})
	}
}

const tokenizer = "../../data/testdata/gpt2.json"

// sized writes n bytes and returns their path.
func sized(t *testing.T, n int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), n), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestShortTexts(t *testing.T) {
	for _, c := range []struct{ bytes, train, held int }{ // samples
		{17, 1, 0}, {33, 2, 0}, {34, 1, 1}, {100, 5, 1}, {339, 20, 1}, {340, 20, 1}, {700, 41, 2},
	} {
		o := parse(t, "--data", sized(t, c.bytes), "--layers", "1", "--width", "8", "--heads", "1", "--context", "16")
		job, err := o.job()
		if err == nil {
			err = job.Validate()
		}
		if err != nil {
			t.Errorf("%d bytes: %v", c.bytes, err)
			continue
		}
		samples := func(d trainer.Dataset) int {
			if d == nil {
				return 0
			}
			bound, err := d.(trainer.Binder).Bind(job.Model.Input, job.Model.Target)
			if err != nil {
				t.Fatal(err)
			}
			return bound.Len()
		}
		if train, held := samples(job.Data), samples(job.Eval); train != c.train || held != c.held {
			t.Errorf("%d bytes: %d samples to train on and %d held out, want %d and %d", c.bytes, train, held, c.train, c.held)
		}
	}
	o := parse(t, "--data", sized(t, 20), "--layers", "1", "--width", "8", "--heads", "1", "--context", "16")
	summary, text := train(t, o, filepath.Join(t.TempDir(), "run"), 1)
	if summary.ValLoss != nil || !strings.Contains(text, "no val_loss: a text of 20 bytes is too short") {
		t.Errorf("val_loss %v, and the program says %q", summary.ValLoss, text)
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"heads", []string{"--data", corpus(t), "--heads", "3"}, "use a divisor such as 2, 4 or 8"},
		{"no data", []string{"--data", "/nonexistent"}, "--data /nonexistent: no such file or directory; give files or folders of text"},
		{"short data", []string{"--data", sized(t, 128)}, "--data: the text has 128 bytes, too few for --context 128: give at least 129 bytes of text, or --context 127 or less"},
		{"one byte", []string{"--data", sized(t, 1), "--context", "1"}, "--data: the text has 1 bytes, too few for --context 1: give at least 2 bytes of text"},
		{"two formats", []string{"--data", "a.jsonl,b.bin"}, "--data a.jsonl is of format jsonl, and b.bin of uint16: give files of one format, or --format"},
		{"no format", []string{"--data", "a", "--format", "xml"}, "--format xml is not known: give auto, text, jsonl"},
		{"no tokenizer", []string{"--data", corpus(t), "--format", "jsonl"}, "documents of format jsonl need --tokenizer tokenizer.json"},
		{"no vocabulary", []string{"--data", corpus(t), "--format", "uint16"}, "give --vocab, the number of different tokens, or the --tokenizer that made them"},
		{"a sample of unknown tokens", []string{"--data", corpus(t), "--format", "uint16", "--vocab", "70000", "--sample", "x"}, "the model has 70000 tokens, which stand for nothing here"},
		{"packed text", []string{"--data", corpus(t), "--pack"}, "--pack: "},
		{"temperature", []string{"--temperature", "-1"}, "--temperature"},
		{"from without sample", []string{"--from", "x"}, "--sample"},
		{"from nowhere", []string{"--from", "/nonexistent", "--sample", "x"}, "/nonexistent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			job, err := parse(t, c.args...).job()
			if err == nil {
				err = job.Validate()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want one line with %q", err, c.want)
			}
		})
	}
}

func TestGoSourceIsTheDefault(t *testing.T) {
	text, err := parse(t).goSource()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range text.Files() {
		if filepath.Ext(path) != ".go" {
			t.Fatalf("%s is part of the data", path)
		}
	}
	if n := text.Bytes(); n < 10<<20 {
		t.Errorf("the Go source tree has %d bytes", n)
	}
	t.Setenv("PATH", "")
	_, err = parse(t).goSource()
	var data *trainer.DataError
	if !errors.As(err, &data) || !strings.Contains(err.Error(), "--data") {
		t.Errorf("without the go command: %v", err)
	}
}

func TestPathsMayRepeat(t *testing.T) {
	o := parse(t, "--data", "a,b", "--data", "c")
	if o.data.String() != "a,b,c" {
		t.Errorf("data %q", o.data)
	}
	if o.data.Set("a,,b") == nil {
		t.Error("an empty path is accepted")
	}
}

func TestPrintable(t *testing.T) {
	if got := printable([]byte("a\tb\n\x1b[2J\xffé\x00")); got != "a\tb\n\uFFFD[2J\uFFFDé\uFFFD" {
		t.Errorf("%q", got)
	}
}

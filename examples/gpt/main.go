// Command gpt trains a small GPT on bytes of text, or on tokens, and lets it write.
//
//	gpt --sample 'func '                       train on the Go source tree, then write
//	gpt --data notes.txt,essays --steps 500    train on files and folders
//	gpt --from runs/latest --sample 'func '    write with a model trained before
//
//	gpt --data 'web/*.jsonl.zst' --tokenizer tokenizer.json --pack    documents, by their tokens
//	gpt --data train.bin --vocab 50257                                tokens of two bytes, as nanoGPT writes them
//	gpt --data 's3://corpus/*.bin' --vocab 50257                      the same in a bucket (package data/bucket)
package main

import (
	"flag"
	"fmt"
	"io"
	"strings"
	"unicode"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

func main() {
	var o options
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		o.register(f)
		return o.job
	})
}

// options are the program's own flags.
type options struct {
	data        paths
	format      string
	field       string
	tokenizer   string
	end         string
	pack        bool
	vocab       uint
	model       nn.GPTConfig
	sample      string
	from        string
	bytes       uint
	temperature float64
	seed        uint64
}

func (o *options) register(f *flag.FlagSet) {
	f.Var(&o.data, "data", "`PATH`s of data: files, folders, patterns or s3:// URLs, comma-separated or repeated (default: Go's source)")
	f.StringVar(&o.format, "format", "auto", "`NAME` of its format: text, jsonl, parquet, tar, uint16, uint32, npy; auto goes by file names")
	f.StringVar(&o.field, "field", "text", "`NAME` of the field or column with the text, in jsonl, parquet and tar")
	f.StringVar(&o.tokenizer, "tokenizer", "", "tokenizer.json `FILE` that makes tokens of text (default: each byte is a token)")
	f.StringVar(&o.end, "end", "<|endoftext|>", "`TOKEN` of the tokenizer behind each document")
	f.BoolVar(&o.pack, "pack", false, "fill contexts with whole documents")
	f.UintVar(&o.vocab, "vocab", 0, "number of different tokens (default that of the tokenizer)")
	f.IntVar(&o.model.Layers, "layers", 4, "transformer blocks")
	f.IntVar(&o.model.Width, "width", 256, "elements of an activation")
	f.IntVar(&o.model.Heads, "heads", 8, "attention heads, a divisor of the width")
	f.IntVar(&o.model.Context, "context", 128, "longest sequence, in tokens")
	f.Float64Var(&o.model.Dropout, "dropout", 0.1, "probability of dropout")
	f.BoolVar(&o.model.Tied, "tied", false, "let the head share the table of the bytes")
	f.StringVar(&o.sample, "sample", "", "let the model continue this `TEXT` at the end")
	f.StringVar(&o.from, "from", "", "with --sample: the `RUN_DIR` of a trained model; no training")
	f.UintVar(&o.bytes, "sample-bytes", 400, "length of the sample, in tokens")
	f.Float64Var(&o.temperature, "temperature", 0.7, "temperature of the sample; 0 always takes the likeliest token")
	f.Uint64Var(&o.seed, "sample-seed", 1, "random seed of the sample")
}

func (o *options) job() (trainer.Job, error) {
	if !(o.temperature >= 0) {
		return trainer.Job{}, fmt.Errorf("--temperature is %v: use 0 or more", o.temperature)
	}
	letters, err := readAlphabet(o.tokenizer)
	if err != nil {
		return trainer.Job{}, err
	}
	if o.from != "" {
		var text strings.Builder
		if err := o.writeFrom(&text, letters); err != nil {
			return trainer.Job{}, err
		}
		return trainer.Job{}, &trainer.Done{Text: text.String()}
	}
	all, vocab, err := o.open(letters)
	if err != nil {
		return trainer.Job{}, err
	}
	if o.sample != "" && vocab != letters.size() {
		return trainer.Job{}, fmt.Errorf("--sample: the model has %d tokens, which stand for nothing here: give their --tokenizer", vocab)
	}
	o.model.Vocab = vocab
	model := nn.GPT(o.model)
	train, held := all, tokens(nil)
	if model.Fault == nil { // else it is reported with all that is wrong with the job
		if train, held, err = o.split(all, letters, int64(model.Input.Len())); err != nil {
			return trainer.Job{}, err
		}
	}
	job := trainer.Job{
		Model:       model,
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(2e-3, 20), Beta2: 0.95, WeightDecay: 0.1},
		GlobalBatch: 32,
		MicroBatch:  2,
		Steps:       200,
		ClipNorm:    1,
		Seed:        1,
	}
	if job.Data, err = o.set(train); err != nil {
		return trainer.Job{}, err
	}
	if held != nil {
		if job.Eval, err = o.set(held); err != nil {
			return trainer.Job{}, err
		}
	}
	job.OnEnd = func(end trainer.End) error {
		if held == nil {
			if _, err := fmt.Fprintf(end.Out, "no val_loss: a text of %d %s is too short to hold some of it out with --context %d\n",
				all.count(), letters.unit(), model.Input.Len()); err != nil {
				return err
			}
		}
		if o.sample == "" {
			return nil
		}
		_, err := fmt.Fprintln(end.Out, o.write(end.Net, letters, model.Input.Len()))
		return err
	}
	return job, nil
}

// writeFrom writes with the model of an earlier run.
func (o *options) writeFrom(out io.Writer, letters alphabet) error {
	if o.sample == "" {
		return fmt.Errorf("--from %s is for writing: pass --sample TEXT too", o.from)
	}
	var config nn.GPTConfig
	name, err := trainer.ReadConfig(o.from, &config)
	if err != nil {
		return err
	}
	model := nn.GPT(config)
	switch {
	case name != model.Name:
		return fmt.Errorf("--from %s: holds no GPT, but a %q", o.from, name)
	case config.Vocab != letters.size():
		return fmt.Errorf("--from %s: holds a GPT with %d tokens: give their --tokenizer", o.from, config.Vocab)
	}
	net, err := trainer.Open(model, o.from)
	if err != nil {
		return err
	}
	defer net.Close()
	_, err = fmt.Fprintln(out, o.write(net, letters, config.Context))
	return err
}

// write lets a model continue o.sample.
func (o *options) write(net *trainer.Net, letters alphabet, context int) string {
	text := letters.encode(o.sample)
	draw := rng.New(o.seed, rng.Place{})
	for range o.bytes {
		window := text[max(0, len(text)-context):]
		in := trainer.Tensor{Shape: []int{1, len(window)}, I: window}
		logits := net.Forward(in)
		next := logits.F[(len(window)-1)*logits.Cols():]
		text = append(text, int32(nn.Sample(next, o.temperature, &draw)))
	}
	return printable(letters.decode(text))
}

// printable replaces what could confuse a terminal.
func printable(text []byte) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, string(text))
}

// paths is a flag that may be repeated and takes lists.
type paths []string

func (p *paths) String() string { return strings.Join(*p, ",") }

func (p *paths) Set(s string) error {
	for _, path := range strings.Split(s, ",") {
		if path == "" {
			return fmt.Errorf("a path is empty")
		}
		*p = append(*p, path)
	}
	return nil
}

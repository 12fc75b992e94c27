// Command gpt trains a small GPT on bytes of text and lets it write.
//
//	gpt --sample 'func '                       train on the Go source tree, then write
//	gpt --data notes.txt,essays --steps 500    train on files and folders
//	gpt --from runs/latest --sample 'func '    write with a model trained before
package main

import (
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
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
	model       nn.GPTConfig
	sample      string
	from        string
	bytes       uint
	temperature float64
	seed        uint64
}

func (o *options) register(f *flag.FlagSet) {
	f.Var(&o.data, "data", "`PATH`s of text, files or folders, comma-separated or repeated (default: the Go source tree)")
	f.IntVar(&o.model.Layers, "layers", 4, "transformer blocks")
	f.IntVar(&o.model.Width, "width", 256, "elements of an activation")
	f.IntVar(&o.model.Heads, "heads", 8, "attention heads, a divisor of the width")
	f.IntVar(&o.model.Context, "context", 128, "longest sequence, in bytes")
	f.Float64Var(&o.model.Dropout, "dropout", 0.1, "probability of dropout")
	f.BoolVar(&o.model.Tied, "tied", false, "let the head share the table of the bytes")
	f.StringVar(&o.sample, "sample", "", "let the model continue this `TEXT` at the end")
	f.StringVar(&o.from, "from", "", "with --sample: the `RUN_DIR` of a trained model; no training")
	f.UintVar(&o.bytes, "sample-bytes", 400, "length of the sample")
	f.Float64Var(&o.temperature, "temperature", 0.7, "temperature of the sample; 0 always takes the likeliest byte")
	f.Uint64Var(&o.seed, "sample-seed", 1, "random seed of the sample")
}

func (o *options) job() (trainer.Job, error) {
	if !(o.temperature >= 0) {
		return trainer.Job{}, fmt.Errorf("--temperature is %v: use 0 or more", o.temperature)
	}
	if o.from != "" {
		var text strings.Builder
		if err := o.writeFrom(&text); err != nil {
			return trainer.Job{}, err
		}
		return trainer.Job{}, &trainer.Done{Text: text.String()}
	}
	text, err := o.text()
	if err != nil {
		return trainer.Job{}, err
	}
	model := nn.GPT(o.model)
	var held *trainer.TextSet
	train := text
	if model.Fault == nil { // else it is reported with all that is wrong with the job
		if train, held, err = split(text, int64(model.Input.Len())); err != nil {
			return trainer.Job{}, err
		}
	}
	job := trainer.Job{
		Model:       model,
		Data:        train,
		Optimizer:   trainer.AdamW{LR: trainer.Cosine(2e-3, 20), Beta2: 0.95, WeightDecay: 0.1},
		GlobalBatch: 32,
		MicroBatch:  2,
		Steps:       200,
		ClipNorm:    1,
		Seed:        1,
	}
	if held != nil {
		job.Eval = held
	}
	job.OnEnd = func(end trainer.End) error {
		if held == nil {
			if _, err := fmt.Fprintf(end.Out, "no val_loss: a text of %d bytes is too short to hold some of it out with --context %d\n",
				text.Bytes(), model.Input.Len()); err != nil {
				return err
			}
		}
		if o.sample == "" {
			return nil
		}
		_, err := fmt.Fprintln(end.Out, o.write(end.Net, model.Input.Len()))
		return err
	}
	return job, nil
}

// split holds out every 20th file, or the last 20th part of a few files. Each part
// needs a sample, so it holds out one sample of a short text, and nothing of a very
// short one: then held is nil.
func split(text *trainer.TextSet, context int64) (train, held *trainer.TextSet, err error) {
	sample := context + 1 // bytes
	n := text.Bytes()
	if n < sample {
		least := fmt.Sprintf("give at least %d bytes of text", sample)
		if n > 1 {
			least += fmt.Sprintf(", or --context %d or less", n-1)
		}
		return nil, nil, fmt.Errorf("--data: the text has %d bytes, too few for --context %d: %s", n, context, least)
	}
	if train, held = text.HoldOut(20); train.Bytes() >= sample && held.Bytes() >= sample {
		return train, held, nil
	}
	if n >= 2*sample {
		train, held = text.Split(n - sample)
		return train, held, nil
	}
	return text, nil, nil
}

// text returns the data: by default, the Go source tree.
func (o *options) text() (*trainer.TextSet, error) {
	if len(o.data) > 0 {
		text, err := trainer.Text(o.data...)
		if err != nil {
			return nil, fmt.Errorf("--data %w; give files or folders of text", err)
		}
		return text, nil
	}
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("the Go source tree is not at hand (go env GOROOT: %v): pass --data PATH", err)}
	}
	var files []string
	root := filepath.Join(strings.TrimSpace(string(out)), "src")
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && filepath.Ext(path) == ".go" {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) == 0 {
		return nil, &trainer.DataError{Path: root, Reason: "holds no Go source tree: pass --data PATH"}
	}
	return trainer.TextFiles(files)
}

// writeFrom writes with the model of an earlier run.
func (o *options) writeFrom(out io.Writer) error {
	if o.sample == "" {
		return fmt.Errorf("--from %s is for writing: pass --sample TEXT too", o.from)
	}
	var config nn.GPTConfig
	name, err := trainer.ReadConfig(o.from, &config)
	if err != nil {
		return err
	}
	model := nn.GPT(config)
	if name != model.Name || config.Vocab != 256 {
		return fmt.Errorf("--from %s: holds no GPT over bytes, but a %q", o.from, name)
	}
	net, err := trainer.Open(model, o.from)
	if err != nil {
		return err
	}
	defer net.Close()
	_, err = fmt.Fprintln(out, o.write(net, config.Context))
	return err
}

// write lets a model continue o.sample.
func (o *options) write(net *trainer.Net, context int) string {
	text := []byte(o.sample)
	draw := rng.New(o.seed, rng.Place{})
	for range o.bytes {
		window := text[max(0, len(text)-context):]
		in := trainer.Tensor{Shape: []int{1, len(window)}, I: make([]int32, len(window))}
		for i, b := range window {
			in.I[i] = int32(b)
		}
		logits := net.Forward(in)
		next := logits.F[(len(window)-1)*logits.Cols():]
		text = append(text, byte(nn.Sample(next, o.temperature, &draw)))
	}
	return printable(text)
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

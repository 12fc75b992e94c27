package nn

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// parameters returns the first values of a model's parameters, layer by
// layer.
func parameters(m trainer.Model) [][]trainer.Tensor {
	all := make([][]trainer.Tensor, len(m.Layers))
	for i, l := range m.Layers {
		for j, p := range l.Params() {
			x := trainer.NewTensor(trainer.Float32, p.Shape...)
			p.Init.Fill(x.F, 1, i, j)
			all[i] = append(all[i], x)
		}
	}
	return all
}

// run is one pass through a model.
type run struct {
	logits trainer.Tensor
	sum    float64
	grads  [][]trainer.Tensor
}

// forward runs a model on tokens, [samples, n], in evaluation.
func forward(m trainer.Model, params [][]trainer.Tensor, tokens trainer.Tensor) trainer.Tensor {
	x := tokens
	for i, l := range m.Layers {
		c, release := trainer.NewContext(trainer.Call{Samples: tokens.Shape[0], Layer: i})
		defer release()
		x, _ = l.Forward(c, params[i], x)
	}
	return x
}

// train runs a model forward and backward.
func train(m trainer.Model, params [][]trainer.Tensor, in, target trainer.Tensor, threads int) run {
	call := trainer.Call{Seed: 3, Step: 2, Samples: in.Shape[0], Train: true, Threads: threads}
	stashes := make([]any, len(m.Layers))
	x := in
	contexts := make([]*trainer.Context, len(m.Layers))
	for i, l := range m.Layers {
		call.Layer = i
		c, release := trainer.NewContext(call)
		defer release()
		contexts[i] = c
		x, stashes[i] = l.Forward(c, params[i], x)
	}
	r := run{logits: x, grads: make([][]trainer.Tensor, len(m.Layers))}
	var d trainer.Tensor
	r.sum, _, d = m.Loss.Loss(contexts[0], x, target)
	for i := len(m.Layers) - 1; i >= 0; i-- {
		for _, p := range params[i] {
			r.grads[i] = append(r.grads[i], trainer.NewTensor(trainer.Float32, p.Shape...))
		}
		d = m.Layers[i].Backward(contexts[i], params[i], stashes[i], d, r.grads[i])
	}
	return r
}

// tokens draws token numbers below vocab.
func tokens(seed uint64, vocab int, shape ...int) trainer.Tensor {
	draw := rng.New(seed, rng.Place{})
	x := trainer.NewTensor(trainer.Int32, shape...)
	for i := range x.I {
		x.I[i] = int32(draw.IntN(vocab))
	}
	return x
}

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

func small(context int) trainer.Model {
	return GPT(GPTConfig{Layers: 2, Width: 24, Heads: 3, Context: context, Vocab: 40, Dropout: 0.1})
}

func TestGPTShapes(t *testing.T) {
	m := GPT(GPTConfig{Dropout: 0.1})
	if m.Fault != nil {
		t.Fatal(m.Fault)
	}
	if want := []string{"embedding", "block.0", "block.1", "block.2", "block.3", "head"}; !slices.Equal(m.LayerNames, want) {
		t.Errorf("layers are %q, want %q", m.LayerNames, want)
	}
	if got := m.Input.String(); got != "int32[128]" || !m.Target.Equal(m.Input) {
		t.Errorf("input %v, target %v", m.Input, m.Target)
	}
	var names []string
	count := 0
	for i, l := range m.Layers {
		for _, p := range l.Params() {
			names = append(names, m.LayerNames[i]+"."+p.Name)
			count += trainer.NewTensor(trainer.Float32, p.Shape...).Len()
			if p.NoDecay != (len(p.Shape) == 1) {
				t.Errorf("%s of shape %v has NoDecay %v", p.Name, p.Shape, p.NoDecay)
			}
		}
	}
	for _, want := range []string{
		"embedding.token.weight", "embedding.position.weight",
		"block.3.norm1.gain", "block.3.norm1.bias", "block.3.attention.qkv.weight", "block.3.attention.qkv.bias",
		"block.3.attention.out.weight", "block.3.attention.out.bias", "block.3.norm2.gain", "block.3.norm2.bias",
		"block.3.mlp.in.weight", "block.3.mlp.in.bias", "block.3.mlp.out.weight", "block.3.mlp.out.bias",
		"head.norm.gain", "head.norm.bias", "head.weight",
	} {
		if !slices.Contains(names, want) {
			t.Errorf("no parameter %s among %q", want, names)
		}
	}
	const w, block = 256, 12*256*256 + 13*256
	if want := 256*w + 128*w + 4*block + 2*w + w*256; count != want {
		t.Errorf("%d parameters, want %d", count, want)
	}
}

func TestGPTConfigSurvivesJSON(t *testing.T) {
	m := GPT(GPTConfig{Layers: 3, Dropout: 0.1})
	text, err := json.Marshal(m.Config)
	if err != nil {
		t.Fatal(err)
	}
	var back GPTConfig
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, m.Config) || back.Layers != 3 || back.Vocab != 256 {
		t.Errorf("%+v became %+v", m.Config, back)
	}
}

func TestGPTFaults(t *testing.T) {
	for _, c := range []struct {
		config GPTConfig
		want   []string
	}{
		{GPTConfig{Heads: 3}, []string{"GPTConfig.Heads (--heads) is 3, which does not divide Width (--width) 256: use a divisor such as 2, 4 or 8"}},
		{GPTConfig{Width: 7, Heads: 2}, []string{"use a divisor such as 1 or 7"}},
		{GPTConfig{Width: 1, Heads: 2}, []string{"use a divisor such as 1"}},
		{GPTConfig{Width: 96, Heads: 200}, []string{"use a divisor such as 32, 48 or 96"}},
		{GPTConfig{Layers: -1, Context: -5, Dropout: 1}, []string{
			"GPTConfig.Layers (--layers) is -1: use 1 to 4000 (0 means the default)",
			"GPTConfig.Context (--context) is -5",
			"GPTConfig.Dropout (--dropout) is 1: use 0 up to, but not including, 1",
		}},
		{GPTConfig{Dropout: math.NaN()}, []string{"--dropout"}},
		{GPTConfig{Dropout: 1 - 1e-12}, []string{"--dropout"}},
		{GPTConfig{Width: 1 << 40, Heads: 1 << 30}, []string{"--width", "--heads"}},
	} {
		fault := GPT(c.config).Fault
		if fault == nil {
			t.Errorf("%+v is accepted", c.config)
			continue
		}
		lines := strings.Split(fault.Error(), "\n")
		if len(lines) != len(c.want) {
			t.Errorf("%+v: faults %q, want %d", c.config, lines, len(c.want))
			continue
		}
		for i, want := range c.want {
			if !strings.Contains(lines[i], want) {
				t.Errorf("%+v: fault %q, want %q in it", c.config, lines[i], want)
			}
		}
	}
}

func TestClassifierFaults(t *testing.T) {
	fault := Classifier(ClassifierConfig{Hidden: []int{5, 0}, Classes: 1, Dropout: -1}).Fault
	if fault == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"Inputs is 0", "Classes is 1", "Hidden[1] is 0", "Dropout is -1"} {
		if !strings.Contains(fault.Error(), want) {
			t.Errorf("fault %q lacks %q", fault, want)
		}
	}
}

// A token must not change what the model says before it.
func TestGPTIsCausal(t *testing.T) {
	const n = chunk + 6
	m := small(n)
	params := parameters(m)
	x := tokens(1, 40, 2, n)
	before := forward(m, params, x)
	for _, at := range []int{1, 5, chunk - 1, chunk, n - 1} {
		y := trainer.NewTensor(trainer.Int32, 2, n)
		copy(y.I, x.I)
		y.I[at] = (y.I[at] + 1) % 40
		after := forward(m, params, y)
		if !sameBits(before.F[:at*40], after.F[:at*40]) {
			t.Errorf("token %d changes logits before it", at)
		}
		if sameBits(before.F[at*40:n*40], after.F[at*40:n*40]) {
			t.Errorf("token %d changes nothing", at)
		}
		if !sameBits(before.F[n*40:], after.F[n*40:]) {
			t.Errorf("token %d of the first sample changes the second", at)
		}
	}
}

// The beginning of a sequence gives the beginning of the output.
func TestGPTOnPrefix(t *testing.T) {
	const n = 2*chunk + 6
	m := small(n)
	params := parameters(m)
	x := tokens(1, 40, 1, n)
	whole := forward(m, params, x)
	for _, k := range []int{1, 7, chunk, chunk + 1, n - 1} {
		y := x.I[:k]
		part := forward(m, params, trainer.Tensor{Shape: []int{1, k}, I: y})
		if !sameBits(part.F, whole.F[:k*40]) {
			t.Errorf("the first %d tokens give other bits alone", k)
		}
	}
}

func TestGPTIsTheSameOnThreads(t *testing.T) {
	for name, m := range map[string]trainer.Model{
		"small":     small(20),
		"odd sizes": GPT(GPTConfig{Layers: 1, Width: 96, Heads: 3, Context: 50, Dropout: 0.1}),
	} {
		t.Run(name, func(t *testing.T) {
			params := parameters(m)
			vocab := m.Config.(GPTConfig).Vocab
			n := m.Input.Shape[0]
			in, target := tokens(1, vocab, 3, n), tokens(2, vocab, 3, n)
			one, two := train(m, params, in, target, 1), train(m, params, in, target, 2)
			if one.sum != two.sum {
				t.Errorf("loss %v and %v", one.sum, two.sum)
			}
			if mean := one.sum / float64(3*n); math.Abs(mean-math.Log(float64(vocab))) > 0.1 {
				t.Errorf("a new model's loss is %.3f a token, want about log %d", mean, vocab)
			}
			for i := range one.grads {
				for j, g := range one.grads[i] {
					if !sameBits(g.F, two.grads[i][j].F) {
						t.Errorf("the gradient of parameter %d of layer %s has other bits", j, m.LayerNames[i])
					}
					if slices.Max(g.F) == 0 && slices.Min(g.F) == 0 {
						t.Errorf("the gradient of parameter %d of layer %s is zero", j, m.LayerNames[i])
					}
				}
			}
		})
	}
}

// A sample's output does not depend on the others in its micro-batch.
func TestGPTSamplesAreIndependent(t *testing.T) {
	m := small(9)
	params := parameters(m)
	x := tokens(1, 40, 3, 9)
	all := forward(m, params, x)
	one := forward(m, params, trainer.Tensor{Shape: []int{1, 9}, I: x.I[9:18]})
	if !sameBits(one.F, all.F[9*40:18*40]) {
		t.Error("sample 1 gives other bits alone")
	}
}

func TestClassifier(t *testing.T) {
	m := Classifier(ClassifierConfig{Inputs: 6, Hidden: []int{17, 8}, Classes: 3, Dropout: 0.1})
	if m.Fault != nil {
		t.Fatal(m.Fault)
	}
	in := trainer.NewTensor(trainer.Float32, 4, 6)
	draw := rng.New(1, rng.Place{})
	for i := range in.F {
		in.F[i] = float32(draw.Normal())
	}
	r := train(m, parameters(m), in, tokens(1, 3, 4, 1), 1)
	if !slices.Equal(r.logits.Shape, []int{4, 3}) || !(r.sum > 0) {
		t.Errorf("logits of shape %v, loss %v", r.logits.Shape, r.sum)
	}
	if want := []string{"hidden.0", "hidden.1", "output"}; !slices.Equal(m.LayerNames, want) {
		t.Errorf("layers are %q", m.LayerNames)
	}
}

func TestMistakesPanicWithReasons(t *testing.T) {
	for name, c := range map[string]struct {
		layer trainer.Layer
		in    trainer.Tensor
		want  string
	}{
		"width":    {Linear{In: 4, Out: 2}, trainer.NewTensor(trainer.Float32, 2, 3), "its last dimension must be 4"},
		"kind":     {LayerNorm{Width: 4}, trainer.NewTensor(trainer.Int32, 2, 4), "int32"},
		"token":    {Embedding{Vocab: 3, Context: 2, Width: 4}, trainer.Tensor{Shape: []int{1, 2}, I: []int32{0, 3}}, "token 3"},
		"sequence": {Embedding{Vocab: 3, Context: 2, Width: 4}, trainer.NewTensor(trainer.Int32, 1, 3), "context 2"},
		"heads":    {CausalAttention{Width: 4, Heads: 3}, trainer.NewTensor(trainer.Float32, 1, 2, 4), "heads"},
		"all":      {Dropout{Prob: 1}, trainer.NewTensor(trainer.Float32, 1, 4), "probability 1:"},
		"negative": {Dropout{Prob: -0.5}, trainer.NewTensor(trainer.Float32, 1, 4), "probability -0.5:"},
		"scores":   {CausalAttention{Width: 4, Heads: 2, Dropout: 2}, trainer.NewTensor(trainer.Float32, 1, 2, 4), "probability 2:"},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if text, _ := recover().(string); !strings.Contains(text, c.want) {
					t.Errorf("panic %q, want %q in it", text, c.want)
				}
			}()
			var params []trainer.Tensor
			for _, p := range c.layer.Params() {
				params = append(params, trainer.NewTensor(trainer.Float32, p.Shape...))
			}
			ctx, release := trainer.NewContext(trainer.Call{Samples: c.in.Shape[0]})
			defer release()
			c.layer.Forward(ctx, params, c.in)
		})
	}
}

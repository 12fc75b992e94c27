package trainer

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/worker/model"
	"github.com/soliton-train/soliton/rng"
)

// Model is a stack of layers with a loss. Layers are what pipeline stages are
// cut from, so a model is best given as a list of blocks of similar cost.
type Model struct {
	// Name and Config describe the model in config.json, so that a saved run
	// can be opened again. Config must survive a round trip through JSON.
	Name   string
	Config any

	// Input and Target describe one sample.
	Input, Target Spec

	Layers []Layer
	Loss   Loss

	// Metrics are numbers beside the loss, of each step and each evaluation: at most 8.
	Metrics []Metric

	// LayerNames are used as prefixes of parameter names, one for each layer;
	// nil means "0", "1" and so on.
	LayerNames []string

	// Tied has further names of parameters that several layers share, each with the first name, such as "head.weight":
	// "embedding.token.weight". Both layers declare the parameter, with one shape. The first layer owns it: its Init and its
	// optimizer's settings count, and its name is the one in model.safetensors. The gradient is the sum of all layers' ones, from the
	// last layer to the first. See docs/torch.md for what shared parameters cost.
	Tied map[string]string

	// Fault is set by a constructor that was given an impossible
	// configuration; Job.Validate reports it.
	Fault error
}

// Metric is a mean over the targets of a step or an evaluation that training does not depend on, such as the share of them that
// the model gets right. It is in metrics.jsonl and in [StepInfo], where it is finite. Sums are added over micro-batches in the order of
// the gradients' tree, so a metric has the same bits whichever worker computes it.
type Metric struct {
	Name string

	// Of returns the sum over the micro-batch's targets, in row order, and the number of targets that counted. Like a
	// [Loss] it is pure, and calls of it may run at the same time. out and target are those of the loss, and read-only.
	Of func(c *Context, out, target Tensor) (sum float64, count int64)
}

// Bounds of metrics. Each line of metrics.jsonl has their names.
const (
	maxMetrics    = 8
	maxMetricName = 64
)

// describeParams describes the parameters of a valid model, whose first values
// follow from the seed.
func describeParams(m *Model, seed uint64) *model.Params {
	p := &model.Params{}
	ties, _ := m.ties()
	away, isAway := m.Loss.(remote)
	if isAway {
		p.Memory = away.Hold
	}
	names := m.layerNames()
	for i, l := range m.Layers {
		var tensors []model.Tensor
		for k, t := range l.Params() {
			if ties.Borrows(model.Place{Layer: i, Tensor: k}) {
				continue
			}
			d := model.Tensor{
				Name: names[i] + "." + t.Name, Shape: t.Shape, Fill: func(x []float32) { t.Init.Fill(x, seed, i, k) },
				Tuning: zero.Tuning{NoDecay: t.NoDecay, LRScale: float32(t.LRScale), WeightDecay: float32(t.WeightDecay)},
			}
			if isAway {
				d.Name, d.Fill = away.Param(i, k), func(x []float32) { away.First(i, k, x) }
			}
			tensors = append(tensors, d)
		}
		p.Add(names[i], tensors)
	}
	return p
}

// ties resolves Tied of a model that has no other faults.
func (m *Model) ties() (*model.Ties, faultList) {
	t, f := &model.Ties{}, faultList{}
	if len(m.Tied) == 0 {
		return t, nil
	}
	type declared struct {
		model.Place
		shape []int
	}
	all, counts := make(map[string]declared), make([]int, len(m.Layers))
	for i, name := range m.layerNames() {
		ps := m.Layers[i].Params()
		counts[i] = len(ps)
		for k, p := range ps {
			all[name+"."+p.Name] = declared{model.Place{Layer: i, Tensor: k}, p.Shape}
		}
	}
	type loan struct {
		model.Place
		layer int
	}
	loans := make(map[loan]bool)
	for _, further := range slices.Sorted(maps.Keys(m.Tied)) {
		first := m.Tied[further]
		a, known := all[first]
		b, ok := all[further]
		_, chain := m.Tied[first]
		wrong := ""
		switch {
		case !known:
			wrong = fmt.Sprintf("no layer has %.80q", first)
		case !ok:
			wrong = fmt.Sprintf("no layer has %.80q", further)
		case chain:
			wrong = fmt.Sprintf("%.80q is tied itself: give the first name of all", first)
		case a.Layer >= b.Layer:
			wrong = "the layer of the first name must come before the other one"
		case !slices.Equal(a.shape, b.shape):
			wrong = fmt.Sprintf("their shapes are %v and %v", a.shape, b.shape)
		case loans[loan{a.Place, b.Layer}]:
			wrong = "the other layer has the parameter under another name already"
		}
		f.when(wrong != "", "Model.Tied", "", "has %.80q for %.80q: %s", first, further, wrong)
		if len(f) == 0 {
			loans[loan{a.Place, b.Layer}] = true
			t.Tie(a.Place, b.Place, a.shape, counts)
		}
	}
	return t, f
}

// allTied reports whether all parameters of a layer have names in Tied.
func (m *Model) allTied(name string, params []Param) bool {
	return !slices.ContainsFunc(params, func(p Param) bool { return m.Tied[name+"."+p.Name] == "" })
}

// layerNames returns the names of the layers.
func (m *Model) layerNames() []string {
	if m.LayerNames != nil {
		return m.LayerNames
	}
	names := make([]string, len(m.Layers))
	for i := range names {
		names[i] = strconv.Itoa(i)
	}
	return names
}

func (m *Model) faults() (f faultList) {
	if m.Fault != nil {
		// Whatever else is wrong follows from this.
		for line := range strings.Lines(m.Fault.Error()) {
			f.when(true, "Model", "", "is impossible: %s", strings.TrimSpace(line))
		}
		return f
	}
	spec := func(field string, s Spec) {
		_, ok := tensor.CheckedSize(s.Shape)
		f.when(!ok || s.Kind > tensor.Int32, field, "", "is %v; every dimension must be at least 1", s)
	}
	spec("Model.Input", m.Input)
	spec("Model.Target", m.Target)
	f.when(m.Loss == nil, "Model.Loss", "", "is nil; give a loss, such as nn.CrossEntropy{}")
	f.when(len(m.Metrics) > maxMetrics, "Model.Metrics", "", "has %d metrics; at most %d are supported", len(m.Metrics), maxMetrics)
	for i, x := range m.Metrics {
		f.when(x.Of == nil, "Model.Metrics", "", "has no function Of at %d (%q)", i, x.Name)
		twice := slices.IndexFunc(m.Metrics, func(o Metric) bool { return o.Name == x.Name }) < i
		f.when(x.Name == "" || twice || len(x.Name) > maxMetricName || strings.ContainsFunc(x.Name, unicode.IsControl), "Model.Metrics", "",
			"has %.80q at %d; names must be unique, printable, and of 1 to %d bytes", x.Name, i, maxMetricName)
	}
	if _, away := m.Loss.(remote); away {
		f.when(len(m.Metrics) > 0, "Model.Metrics", "", "has metrics, and the loss is computed in another process, which has its own")
	}
	f.when(len(m.Layers) == 0, "Model.Layers", "", "is empty; give at least one layer")
	f.when(len(m.Layers) >= 1<<rng.LayerBits, "Model.Layers", "", "has %d layers; at most %d are supported", len(m.Layers), 1<<rng.LayerBits-1)
	if m.LayerNames != nil && len(m.LayerNames) != len(m.Layers) {
		f.when(true, "Model.LayerNames", "", "has %d names for %d layers", len(m.LayerNames), len(m.Layers))
		return f
	}
	names := m.layerNames()
	for i, name := range names {
		f.when(name == "" || slices.Index(names, name) < i, "Model.LayerNames", "", "has %q at %d; names must be unique and not empty", name, i)
	}
	for i, l := range m.Layers {
		if l == nil {
			f.when(true, "Model.Layers", "", "has nil at %d (%q)", i, names[i])
			continue
		}
		found, tooLarge := layerFaults(l, names[i])
		f = append(f, found...)
		if tooLarge {
			return f // as the others will be
		}
		if v := reflect.ValueOf(l); v.Kind() == reflect.Pointer && !m.allTied(names[i], l.Params()) {
			for k, other := range m.Layers[:i] {
				o := reflect.ValueOf(other)
				f.when(o.Kind() == reflect.Pointer && o.Pointer() == v.Pointer() && o.Type() == v.Type(), "Model.Layers", "",
					"has one layer as %q and as %q: make two layers, or name in Model.Tied the parameters that they share", names[k], names[i])
			}
		}
	}
	if len(f) == 0 {
		_, f = m.ties()
	}
	return f
}

func layerFaults(l Layer, name string) (f faultList, tooLarge bool) {
	when := func(wrong bool, format string, args ...any) {
		f.when(wrong, "Model.Layers", "", "layer %q "+format, append([]any{name}, args...)...)
	}
	total := 0
	seen := make(map[string]bool)
	for i, p := range l.Params() {
		when(p.Name == "" || seen[p.Name], "names its parameter %d %q; names must be unique and not empty", i, p.Name)
		seen[p.Name] = true
		n, ok := tensor.CheckedSize(p.Shape)
		if positive := len(p.Shape) == 0 || slices.Min(p.Shape) >= 1; positive && (!ok || total > tensor.MaxElements-n) {
			when(true, "has more than %d parameters with %q of shape %v; use narrower layers", tensor.MaxElements, p.Name, p.Shape)
			return f, true
		}
		if !ok {
			when(true, "gives parameter %q the shape %v; every dimension must be at least 1", p.Name, p.Shape)
			continue
		}
		total += n
		when(p.Init.Kind > InitUniform, "gives parameter %q an initialiser of unknown kind %d", p.Name, p.Init.Kind)
		s := float64(p.Init.Scale)
		when(math.IsNaN(s) || math.IsInf(s, 0), "gives parameter %q an initialiser of scale %v", p.Name, s)
		const most = math.MaxFloat32
		when(!(p.LRScale >= 0 && p.LRScale <= most), "gives parameter %q the scale %v of the learning rate; it must be above 0, or 0 for 1", p.Name, p.LRScale)
		when(!(p.WeightDecay >= 0 && p.WeightDecay <= most), "gives parameter %q the weight decay %v; it must be above 0, or 0 for that of the optimizer", p.Name, p.WeightDecay)
	}
	return f, false
}

// needs estimates the bytes that a job takes at least, all workers together:
// arrays values of every parameter, the gradient of the largest layer on its
// way into the tree, and a micro-batch of samples. Activations come on top. It
// is a float64, which does not overflow.
func needs(m *Model, params *model.Params, arrays, microBatch int) float64 {
	largest := 0
	for _, l := range params.Layers {
		largest = max(largest, l.Size())
	}
	sample := float64(tensor.Size(m.Input.Shape)) + float64(tensor.Size(m.Target.Shape))
	return 4 * (float64(arrays)*float64(params.Count()) + float64(largest) + float64(microBatch)*sample)
}

// memoryFault says that a valid model does not fit into the available bytes,
// or nothing. arrays and microBatch are as for needs.
func memoryFault(m *Model, params *model.Params, arrays, microBatch int, available float64) []Fault {
	need := needs(m, params, arrays, microBatch)
	if need <= available {
		return nil
	}
	text := fmt.Sprintf("takes at least %s of memory, and this machine has %s to spare; ", gigabytes(need), gigabytes(available))
	if batch := needs(m, params, 0, microBatch) - needs(m, params, 0, 0); batch > need/2 {
		text += fmt.Sprintf("use micro-batches of less than %d samples, or smaller samples", microBatch)
	} else {
		text += fmt.Sprintf("use fewer or narrower layers: it has %d parameters, and not much more than %.2g fit", params.Count(), available/float64(4*arrays))
	}
	return []Fault{{"Model", "", text}}
}

func gigabytes(bytes float64) string { return fmt.Sprintf("%.1f GB", bytes/1e9) }

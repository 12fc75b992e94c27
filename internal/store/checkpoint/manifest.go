package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Format is the version of the format that this package writes. It reads version 1 as well, whose manifests end with Files.
const Format = 2

// Bounds of a manifest. They leave room for jobs of a thousand workers and
// layers of 10¹² parameters, and no sum of sizes overflows.
const (
	MaxManifest = 16 << 20 // bytes of an encoded manifest
	maxName     = 255      // bytes of names
	maxLayers   = 1 << 20
	maxLayer    = 1 << 40 // elements
	maxFiles    = 1 << 16
	maxHosts    = 1 << 10 // of a file
	maxTensors  = 1 << 16

	maxDescribed = 4 << 20 // bytes of the encoded tensors, about

	maxDimensions = 16 // of a tensor
)

// rules are the optimizers and the names of their moments, in the order in
// which a shard holds them.
var rules = map[string][]string{
	"adamw": {"exp_avg", "exp_avg_sq"},
	"sgd":   {"momentum"},
}

// Manifest says what a checkpoint is and what belongs to it.
type Manifest struct {
	Format int        `json:"format"` // 0 means [Format]
	Job    string     `json:"job"`    // identity of the job; a checkpoint of another is refused
	Step   int        `json:"step"`   // steps that are in the state
	Plan   id.Version `json:"plan"`   // plan of the step
	Rule   string     `json:"rule"`   // adamw or sgd
	Layers []int      `json:"layers"` // parameters of each layer
	Files  []File     `json:"files"`  // their ranges cover every parameter once

	// What is not known is left out.
	Made    rundir.Time `json:"made,omitzero"`      // when it was made, in UTC with milliseconds
	Loss    *float64    `json:"loss,omitempty"`     // of the step
	ValLoss *float64    `json:"val_loss,omitempty"` // of the evaluation that followed the step
	Tensors []Tensor    `json:"tensors,omitempty"`  // of all layers, in order: together they are the layers' parameters

	Digest string `json:"digest"` // SHA-256 of the manifest's encoding with "" here; set by Encode
}

// Tensor is a tensor of the model: an array of its layer's parameters, after those before it.
type Tensor struct {
	Layer int    `json:"layer"`
	Name  string `json:"name"`
	Shape []int  `json:"shape"`
}

// Len returns the number of elements, below 0 if that is more than a layer may have.
func (t Tensor) Len() int {
	n := 1
	for _, d := range t.Shape {
		if d < 0 || d > maxLayer || d > 0 && n > maxLayer/d {
			return -1
		}
		n *= d
	}
	return n
}

// Size returns the bytes of all files.
func (m *Manifest) Size() (bytes int64) {
	for _, f := range m.Files {
		bytes += f.Size
	}
	return bytes
}

// File is one file of a checkpoint.
type File struct {
	Name   string     `json:"name"`   // within the checkpoint's directory
	Size   int64      `json:"size"`   // bytes
	SHA256 string     `json:"sha256"` // lower-case hexadecimal
	Ranges []id.Range `json:"ranges"` // in the order of the file; none is empty

	// Hosts are those that have the file, where each has a run directory of its own: it may be missing on the others. Without
	// them, all hosts see one file system.
	Hosts []string `json:"hosts,omitempty"`
}

// tensor returns the name of the tensor that holds the given part of a range.
func tensor(r id.Range, part string) string {
	return fmt.Sprintf("layer.%d/%s[%d:%d]", r.Layer, part, r.Lo, r.Hi)
}

const params = "params"

var (
	fileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$`)
	hexHash  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// Validate reports all that is wrong with a manifest, except for
// Digest, which [Manifest.Encode] sets.
func (m *Manifest) Validate() error {
	errs := identity(m.Job, m.Step, m.Plan, m.Rule)
	errs.If(m.Format < 0 || m.Format > Format, "format: %d is none of 1 to %d", m.Format, Format)
	errs.If(m.Format == 1 && !(m.Made.IsZero() && m.Loss == nil && m.ValLoss == nil && m.Tensors == nil), "format: version 1 has none of made, loss, val_loss and tensors")
	errs.If(len(m.Tensors) > maxTensors, "tensors: there are %d; want at most %d", len(m.Tensors), maxTensors)
	errs.If(len(m.Layers) == 0 || len(m.Layers) > maxLayers, "layers: there are %d; want 1 to %d", len(m.Layers), maxLayers)
	errs.If(len(m.Files) == 0 || len(m.Files) > maxFiles, "files: there are %d; want 1 to %d", len(m.Files), maxFiles)
	if errs != nil {
		return errs.Err() // below this, the numbers of things are bounded
	}
	for i, n := range m.Layers {
		errs.If(n < 0 || n > maxLayer, "layers[%d]: %d parameters; want 0 to %d", i, n, maxLayer)
	}
	names := make(map[string]bool, len(m.Files))
	for _, f := range m.Files {
		errs.If(len(f.Name) > maxName || !fileName.MatchString(f.Name), "files: %q is no name of a .safetensors file", f.Name)
		errs.If(names[f.Name], "files: %s is there twice", f.Name)
		names[f.Name] = true
		errs.If(f.Size < 8, "files: %s has %d bytes; a safetensors file has at least 8", f.Name, f.Size)
		errs.If(len(f.Hosts) > maxHosts, "files: %s is on %d hosts; at most %d are allowed", f.Name, len(f.Hosts), maxHosts)
		for _, h := range f.Hosts {
			errs.If(h == "" || len(h) > maxName || !utf8.ValidString(h), "files: %s is on host %q; want 1 to %d bytes of UTF-8", f.Name, h, maxName)
		}
		errs.If(!hexHash.MatchString(f.SHA256), "files: %s has %q for a SHA-256; want 64 digits in lower case", f.Name, f.SHA256)
	}
	errs.Add(cover(m.Layers, m.Files)...)
	errs.Add(m.checkTensors()...)
	return errs.Err()
}

// Describe sets the tensors of the layers, unless they cannot be those or take more than some megabytes: a checkpoint is a checkpoint
// without them.
func (m *Manifest) Describe(all []Tensor) {
	size := 0
	for _, t := range all {
		size += len(t.Name) + 32*(1+len(t.Shape))
	}
	if m.Tensors = all; size > maxDescribed || len(all) > maxTensors || m.checkTensors() != nil {
		m.Tensors = nil
	}
}

// checkTensors returns what is wrong with the tensors.
func (m *Manifest) checkTensors() (errs faults.List) {
	if m.Tensors == nil {
		return nil
	}
	sizes, names, layer := make([]int, len(m.Layers)), make(map[string]bool, len(m.Tensors)), 0
	for _, t := range m.Tensors {
		n := t.Len()
		if t.Layer < layer || t.Layer >= len(m.Layers) || n < 0 || len(t.Shape) > maxDimensions || t.Name == "" || len(t.Name) > maxName || !utf8.ValidString(t.Name) || names[t.Name] {
			errs.Add(fmt.Errorf("tensors: %.40q of layer %d with shape %v cannot be one, is there twice, or is out of order", t.Name, t.Layer, t.Shape))
			return errs
		}
		layer, names[t.Name] = t.Layer, true
		sizes[layer] = min(sizes[layer]+n, maxLayer+1)
	}
	for i, n := range sizes {
		if n != m.Layers[i] {
			errs.Add(fmt.Errorf("tensors: those of layer %d have %d elements, and the layer has %d", i, n, m.Layers[i]))
			return errs
		}
	}
	return errs
}

// identity returns what is wrong with the fields that a part and a manifest share.
func identity(job string, step int, plan id.Version, rule string) (errs faults.List) {
	errs.If(job == "" || len(job) > maxName || !utf8.ValidString(job), "job: want 1 to %d bytes of UTF-8", maxName)
	errs.If(step < 0, "step: %d is below 0", step)
	errs.If(plan.Generation < 0 || plan.N < 0, "plan: %d.%d is no version", plan.Generation, plan.N)
	errs.If(rules[rule] == nil, "rule: %q is none of %s", rule, strings.Join(slices.Sorted(maps.Keys(rules)), ", "))
	return errs
}

// maxHoles is how many holes and overlaps are told; one lost file of many makes hundreds.
const maxHoles = 10

// cover returns where the ranges of the files do not cover every parameter exactly once.
func cover(layers []int, files []File) (holes []error) {
	type piece struct {
		id.Range
		file string
	}
	var pieces []piece
	for _, f := range files {
		for _, r := range f.Ranges {
			pieces = append(pieces, piece{r, f.Name})
		}
	}
	slices.SortFunc(pieces, func(a, b piece) int { return a.Compare(b.Range) })
	fault := func(format string, args ...any) {
		if len(holes) < maxHoles {
			holes = append(holes, fmt.Errorf(format, args...))
		}
	}
	layer, at := 0, 0 // all before this is covered
	advance := func(to int) {
		for ; layer < to; layer, at = layer+1, 0 {
			if at < layers[layer] {
				fault("files: none has [%d,%d) of layer %d", at, layers[layer], layer)
			}
		}
	}
	for _, p := range pieces {
		if p.Layer < 0 || p.Layer >= len(layers) || p.Lo < 0 || p.Lo >= p.Hi || p.Hi > layers[p.Layer] {
			fault("files: %s has the impossible range [%d,%d) of layer %d", p.file, p.Lo, p.Hi, p.Layer)
			continue
		}
		advance(p.Layer)
		switch {
		case p.Lo > at:
			fault("files: none has [%d,%d) of layer %d", at, p.Lo, p.Layer)
		case p.Lo < at:
			fault("files: %s has [%d,%d) of layer %d, of which another has a part", p.file, p.Lo, p.Hi, p.Layer)
		}
		at = max(at, p.Hi)
	}
	advance(len(layers))
	return holes
}

// Encode returns the bytes of manifest.json, which are one line, and the same
// for equal manifests.
func (m *Manifest) Encode() ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("checkpoint: manifest: %w", err)
	}
	c := *m
	c.Format = cmp.Or(m.Format, Format)
	c.Files = slices.Clone(m.Files)
	for i := range c.Files {
		c.Files[i].Ranges = append([]id.Range{}, c.Files[i].Ranges...) // [] for none, never null
	}
	c.Digest = ""
	bare, err := json.Marshal(&c)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(bare)
	c.Digest = hex.EncodeToString(sum[:])
	b, err := json.Marshal(&c)
	if err != nil {
		return nil, err
	}
	if len(b)+1 > MaxManifest {
		return nil, fmt.Errorf("checkpoint: manifest: %d bytes; at most %d are allowed", len(b)+1, MaxManifest)
	}
	return append(b, '\n'), nil
}

// ParseManifest reads what [Manifest.Encode] wrote. The error is an [*Error]
// without a path; it wraps [ErrForeign] for another version of the format, else
// [ErrMalformed] or [ErrAltered].
func ParseManifest(b []byte) (*Manifest, error) {
	fail := func(kind error, format string, args ...any) (*Manifest, error) {
		return nil, &Error{Kind: kind, Reason: fmt.Sprintf(format, args...)}
	}
	if len(b) > MaxManifest {
		return fail(ErrMalformed, "%d bytes, where %d are the most", len(b), MaxManifest)
	}
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &version); err != nil {
		return fail(ErrMalformed, "%v", err)
	}
	if version.Format < 1 || version.Format > Format {
		return fail(ErrForeign, "it has version %d of the format, and this program reads versions 1 to %d", version.Format, Format)
	}
	m := new(Manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return fail(ErrMalformed, "%v", err)
	}
	if err := m.Validate(); err != nil {
		return fail(ErrMalformed, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	again, err := m.Encode()
	if err != nil {
		return fail(ErrMalformed, "%v", err)
	}
	// One comparison finds a wrong digest and whatever JSON forgives: unknown fields, repeated ones, other cases, spaces.
	if !bytes.Equal(again, b) {
		return fail(ErrAltered, "its content is not what its digest %.12s says", m.Digest)
	}
	return m, nil
}

package checkpoint

import (
	"bytes"
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
)

// Format is the version of the format that this package writes and reads.
const Format = 1

// Bounds of a manifest. They leave room for jobs of a thousand workers and
// layers of 10¹² parameters, and no sum of sizes overflows.
const (
	MaxManifest = 16 << 20 // bytes of an encoded manifest
	maxName     = 255      // bytes of names
	maxLayers   = 1 << 20
	maxLayer    = 1 << 40 // elements
	maxFiles    = 1 << 16
	maxHosts    = 1 << 10 // of a file
)

// rules are the optimizers and the names of their moments, in the order in
// which a shard holds them.
var rules = map[string][]string{
	"adamw": {"exp_avg", "exp_avg_sq"},
	"sgd":   {"momentum"},
}

// Manifest says what a checkpoint is and what belongs to it.
type Manifest struct {
	Format int        `json:"format"` // set by Encode
	Job    string     `json:"job"`    // identity of the job; a checkpoint of another is refused
	Step   int        `json:"step"`   // steps that are in the state
	Plan   id.Version `json:"plan"`   // plan of the step
	Rule   string     `json:"rule"`   // adamw or sgd
	Layers []int      `json:"layers"` // parameters of each layer
	Files  []File     `json:"files"`  // their ranges cover every parameter once
	Digest string     `json:"digest"` // SHA-256 of the manifest's encoding with "" here; set by Encode
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

// Validate reports all that is wrong with a manifest, except for Format and
// Digest, which [Manifest.Encode] sets.
func (m *Manifest) Validate() error {
	errs := identity(m.Job, m.Step, m.Plan, m.Rule)
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
	return errs.Err()
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
	c.Format = Format
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
	if version.Format != Format {
		return fail(ErrForeign, "it has version %d of the format, and this program reads version %d", version.Format, Format)
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

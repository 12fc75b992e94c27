package change

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/net/control"
)

// mayDiffer are the fields of a job in which workers may differ: the kernel path and the platform give the same bits, and the host
// sets the others.
var mayDiffer = []string{"kernel", "platform", "reduction", "zero", "workers", "stages", "threads", "started", "command", "dir", "python", "mirrors",
	"min_workers", "detect", "call_timeout", "respawn", "no_digests", "verify", "reshape", "keep", "keep_every", "keep_best", "checkpoints", "lineage"}

// First returns the first field, by its name in job.json, in which the jobs of two workers differ, and both values where they
// tell the user something. The program comes first, since it explains all others.
func First(a, b control.Ready) (field, values string) {
	ja, jb := reflect.ValueOf(a.Job), reflect.ValueOf(b.Job)
	program := a.Job.ProgramSHA256 != b.Job.ProgramSHA256
	for i := range ja.NumField() {
		name, _, _ := strings.Cut(ja.Type().Field(i).Tag.Get("json"), ",")
		if slices.Contains(mayDiffer, name) || program && name != "program_sha256" {
			continue
		}
		x, y := ja.Field(i).Interface(), jb.Field(i).Interface()
		if !reflect.DeepEqual(x, y) {
			return name, describe(name, x, y, a, b)
		}
	}
	// The digests above cover the data, where they are honest.
	if !slices.Equal(a.Data, b.Data) {
		return "data", otherFile(a, b)
	}
	same := func(x, y control.Layer) bool { return x.Name == y.Name && slices.Equal(x.Tensors, y.Tensors) }
	if !slices.EqualFunc(a.Layers, b.Layers, same) {
		i := 0
		for i < min(len(a.Layers), len(b.Layers)) && same(a.Layers[i], b.Layers[i]) {
			i++
		}
		return "layers", fmt.Sprintf("layer %d", i)
	}
	return "", ""
}

func describe(name string, x, y any, a, b control.Ready) string {
	if strings.HasSuffix(name, "_sha256") {
		if name == "program_sha256" {
			return ""
		}
		return otherFile(a, b)
	}
	if raw, ok := x.(interface{ MarshalJSON() ([]byte, error) }); ok {
		x, _ = raw.MarshalJSON()
		raw, _ = y.(interface{ MarshalJSON() ([]byte, error) })
		y, _ = raw.MarshalJSON()
	}
	if key := differingKey(x, y); key != "" {
		return key
	}
	text := func(v any) string {
		if b, ok := v.([]byte); ok {
			v = string(bytes.TrimSpace(b))
		}
		return oneLine(fmt.Sprintf("%v", v))
	}
	if tx, ty := text(x), text(y); len(tx)+len(ty) < 200 {
		return fmt.Sprintf("%s, not %s", ty, tx)
	}
	return ""
}

// differingKey names the first key in which two JSON objects differ, "" where there is none or one of them is no object.
func differingKey(x, y any) string {
	bx, _ := x.([]byte)
	by, _ := y.([]byte)
	var a, b map[string]json.RawMessage
	if json.Unmarshal(bx, &a) != nil || json.Unmarshal(by, &b) != nil {
		return ""
	}
	for _, key := range slices.Sorted(maps.Keys(a)) {
		if !bytes.Equal(a[key], b[key]) {
			if text := oneLine(fmt.Sprintf("%s: %s, not %s", key, b[key], a[key])); len(text) < 200 {
				return text
			}
			return oneLine(key)
		}
	}
	return ""
}

// otherFile names the first file that is not the same.
func otherFile(a, b control.Ready) string {
	for i := range max(len(a.Data), len(b.Data)) {
		switch {
		case i >= len(a.Data):
			return "file " + oneLine(b.Data[i].Path)
		case i >= len(b.Data) || a.Data[i] != b.Data[i]:
			return "file " + oneLine(a.Data[i].Path)
		}
	}
	return ""
}

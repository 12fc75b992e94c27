package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const sample = `[
{"name":"step-rate","title":"a step","axis":"our speed","goal":1.3,"bars":[
	{"label":"batch 8","median":1.2,"low":1.1,"high":1.3},{"label":"batch < 2","median":1.5,"low":1.4,"high":1.6}]},
{"name":"survive-time","title":"recovery","axis":"times faster","log":true,"bars":[{"label":"torchrun","median":400,"low":300,"high":500}]},
{"name":"same","title":"equal","axis":"ratio","bars":[{"label":"one","median":1,"low":1,"high":1}]}]`

// Each plot is an SVG file with its title, axis and cases, the same whenever it is drawn.
func TestPlots(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	for _, dir := range []string{first, second} {
		if err := run(strings.NewReader(sample), dir); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string][]string{
		"step-rate.svg": {"a step", "our speed", "batch 8", "batch < 2"}, "survive-time.svg": {"recovery", "times faster", "torchrun", "100"}, "same.svg": {"equal", "one"},
	} {
		svg, err := os.ReadFile(filepath.Join(first, name))
		if err != nil {
			t.Fatal(err)
		}
		if again, _ := os.ReadFile(filepath.Join(second, name)); !bytes.Equal(svg, again) {
			t.Errorf("%s differs from one drawing to the next", name)
		}
		var text strings.Builder
		for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s is no XML: %v", name, err)
			}
			if c, ok := token.(xml.CharData); ok {
				text.Write(c)
			}
		}
		for _, w := range want {
			if !strings.Contains(text.String(), w) {
				t.Errorf("%s does not contain %q: %s", name, w, text.String())
			}
		}
	}
}

// What cannot be drawn is refused with a reason, and names no file outside of the folder.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{`, "standard input: "},
		{`[{"name":"../x","bars":[{"label":"a","median":1,"low":1,"high":1}]}]`, "letters, digits and dashes"},
		{`[{"name":"x","bars":[]}]`, "0 bars"},
		{`[{"name":"x","bars":[{"label":"a","median":1,"low":0,"high":1}]}]`, "must be positive"},
		{`[{"name":"x","bars":[{"label":"a","median":1,"low":1,"high":0.5}]}]`, "in order"},
		{`[{"name":"x","goal":-1,"bars":[{"label":"a","median":1,"low":1,"high":1}]}]`, "negative"},
	} {
		if err := run(strings.NewReader(c.in), t.TempDir()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.in, err, c.want)
		}
	}
}

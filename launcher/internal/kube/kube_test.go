package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOf(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("k", 64)+"\n"), 0o400); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{envHosts: "3", envIndex: "1", envJob: "gpt", envKey: key}
	with := func(name, value string) func(string) string {
		return func(asked string) string {
			if asked == name {
				return value
			}
			return env[asked]
		}
	}
	p, err := Of(with("", ""))
	if err != nil || p.Index != 1 || p.Hosts != 3 || len(p.Key) != 64 || strings.Join(p.Addrs(), " ") != "gpt-0.gpt:29900 gpt-2.gpt:29900" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := Of(with(envIndex, "5")); err != nil || len(p.Addrs()) != 3 {
		t.Errorf("a pod of a job that was scaled: %+v, %v", p, err)
	}
	for _, name := range []string{envHosts, envIndex} {
		if p, err := Of(with(name, "")); p != nil || err != nil {
			t.Errorf("without %s: %+v, %v", name, p, err)
		}
	}
	for _, wrong := range [][2]string{{envHosts, "x"}, {envHosts, "65"}, {envIndex, "-1"}, {envIndex, "64"}, {envJob, ""}, {envJob, "a.b"}, {envKey, key + "-"}, {envKey, os.DevNull}} {
		if p, err := Of(with(wrong[0], wrong[1])); err == nil {
			t.Errorf("%v: %+v", wrong, p)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Job{Name: "gpt", Image: "a/b:1", Hosts: 3, Program: []string{"/train"}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Job){
		"--name":     func(j *Job) { j.Name = "a\nb" },
		"--image":    func(j *Job) { j.Image = "a b" },
		"--hosts":    func(j *Job) { j.Hosts = 65 },
		"PROGRAM is": func(j *Job) { j.Program = nil },
		"not UTF-8":  func(j *Job) { j.Program = []string{"\xff"} },
	} {
		j := good
		change(&j)
		if err := j.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

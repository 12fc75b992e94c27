package controller

import (
	"reflect"

	"github.com/soliton-train/soliton/internal/net/wire"
)

// Warm makes the first report, order and fill of a process as quick as later ones: msgpack takes
// a type apart when it meets it first, for which a recovery would wait.
func Warm() {
	for _, v := range []any{&Report{}, &Order{}, &Fill{}} {
		sample(reflect.ValueOf(v).Elem())
		if text, err := wire.Marshal(v); err == nil {
			_ = wire.Unmarshal(text, v)
		}
	}
}

// sample gives every slice and pointer of a value one element, so that nothing is left out.
func sample(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			sample(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		sample(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		sample(v.Elem())
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint64:
		v.SetUint(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("1")
	}
}
